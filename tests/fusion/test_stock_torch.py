"""torch.nn's encoder-decoder, as UN's translation rows have it, is recalibrated and fused exactly."""

import pytest
import torch
from conftest import as_trained
from torch import Tensor, nn

import slab_det
from slab_det.fusion import Fold, verify_fusion


class Translator(nn.Module):
    """Sentences (2, B, L) of source and target words -> logits (B, L, words)."""

    def __init__(self, words: int = 30, channels: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, channels)
        self.transformer = nn.Transformer(channels, 2, 2, 2, 32, norm_first=True, batch_first=True)
        self.to_logits = nn.Linear(channels, words)

    def forward(self, sentences: Tensor) -> Tensor:
        source, target = self.embedding(sentences)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.to_logits(self.transformer(source, target, tgt_mask=causal))

    def folds(self) -> list[Fold]:
        return [Fold('transformer.decoder.norm', before='to_logits')]


@pytest.mark.filterwarnings('ignore:enable_nested_tensor is True')
@pytest.mark.parametrize('norm', ['UN', 'PRepBN'])
def test_an_encoder_decoder_is_recalibrated_and_fused(norm):
    model = as_trained(slab_det.convert_norms(Translator(), dict(type=norm)).double())
    batches = torch.randint(30, (4, 2, 5, 12))
    slab_det.recalibrate(model, batches)
    fused = slab_det.fuse(model)
    # Two norms in each layer of the encoder, three in each of the decoder, one at each end.
    assert [fusion.outcome for fusion in fused.fusion_report.norms] == ['folded'] * 12
    memory = next(fusion for fusion in fused.fusion_report.norms if fusion.norm == 'transformer.encoder.norm')
    assert memory.into == ', '.join(f'transformer.decoder.layers.{i}.multihead_attn[kv]' for i in (0, 1))
    # In these modes torch takes a kernel that would never call the norms.
    with torch.no_grad():
        check = verify_fusion(model, fused, batches, lambda model, words: (model(words.long()),))
    assert 0 < check.float64 < 1e-9, check
