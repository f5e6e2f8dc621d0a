"""torch.nn's encoder-decoder, as UN's translation rows have it: trained, recalibrated, fused exactly."""

import pytest
import torch
from conftest import differing
from fusion_checks import left_affine
from torch import Tensor, nn

import slab_det
from slab_det.fusion import Fold, verify_fusion


class Translator(nn.Module):
    """Sentences (2, B, L) of source and target words -> logits (B, L, words)."""

    def __init__(self, norm_first: bool, words: int = 30, channels: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, channels)
        self.transformer = nn.Transformer(channels, 2, 2, 2, 32, norm_first=norm_first, batch_first=True)
        self.to_logits = nn.Linear(channels, words)

    def forward(self, sentences: Tensor) -> Tensor:
        source, target = self.embedding(sentences)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.to_logits(self.transformer(source, target, tgt_mask=causal))

    def folds(self) -> list[Fold]:
        return [Fold('transformer.decoder.norm', before='to_logits')]


@pytest.mark.filterwarnings('ignore:enable_nested_tensor is True')
@pytest.mark.parametrize('norm', [dict(type='UN', warmup_iters=4), dict(type='PRepBN')], ids=lambda norm: norm['type'])
def test_an_encoder_decoder_is_trained_recalibrated_and_fused(norm):
    model = slab_det.convert_norms(Translator(norm_first=True), norm).double().train()
    batches = torch.randint(30, (4, 2, 5, 12))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(10):
        slab_det.set_gamma(model, max(0.0, 1 - step / 8))
        loss = nn.functional.cross_entropy(model(batches[step % 4]).flatten(0, 1), batches[step % 4, 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    slab_det.recalibrate(model.eval(), batches)
    moved = differing(model, before)
    assert len([key for key in moved if key.endswith('running_var')]) == 12

    fused = slab_det.fuse(model)
    # Two norms in each layer of the encoder, three in each of the decoder, one at each end.
    assert [fusion.outcome for fusion in fused.fusion_report.norms] == ['folded'] * 12
    memory = next(fusion for fusion in fused.fusion_report.norms if fusion.norm == 'transformer.encoder.norm')
    assert memory.into == ', '.join(f'transformer.decoder.layers.{i}.multihead_attn[kv]' for i in (0, 1))
    # In these modes torch takes a kernel that would never call the norms.
    with torch.no_grad():
        check = verify_fusion(model, fused, batches, lambda model, words: (model(words.long()),))
    assert 0 < check.float64 < 1e-9, check


@torch.no_grad()
def test_norms_behind_the_residual_stay():
    """The stream passes them: the encoder's, which its kernel reads, as LayerNorms, the decoder's as multiply-adds."""
    original, sentences = Translator(norm_first=False).double().eval(), torch.randint(30, (2, 5, 12))
    model = slab_det.convert_norms(original, dict(type='PRepBN'))
    torch.testing.assert_close(model(sentences), original(sentences))
    slab_det.set_gamma(model, 0)
    slab_det.recalibrate(model, [sentences])
    fused = slab_det.fuse(model)
    assert len(fused.fusion_report.select('kept')) == 4 and len(left_affine(fused)) == 6
    torch.testing.assert_close(fused(sentences), model(sentences), rtol=1e-9, atol=1e-9)
