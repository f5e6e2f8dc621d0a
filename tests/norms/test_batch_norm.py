"""TokenBN, RepBN and PRepBN against torch and the formulas of the SLAB paper."""

import pytest
import torch
from norm_formulas import C, copy_parameters, formula, make_norm, tokens
from torch import nn

from slab_det import set_gamma
from slab_det.norms import PRepBN, RepBN, TokenBN


def statistics_of(norm: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in norm.statistics()]


@pytest.mark.parametrize('training', [True, False])
def test_token_bn_is_batch_norm_over_all_tokens(training):
    norm, reference = make_norm(TokenBN).train(training), nn.BatchNorm1d(C).double().train(training)
    reference.load_state_dict({**norm.state_dict(), 'num_batches_tracked': torch.tensor(0)})
    for shape in ((2, 7), (1, 30), (4, 3)):
        x, y = tokens(*shape, requires_grad=True), None
        y = norm(x)
        reference_x = x.detach().transpose(1, 2).requires_grad_()
        expected = reference(reference_x)
        torch.testing.assert_close(y, expected.transpose(1, 2))
        weight = torch.randn_like(y)
        y.backward(weight)
        expected.backward(weight.transpose(1, 2))
        torch.testing.assert_close(x.grad, reference_x.grad.transpose(1, 2))
    for name in ('running_mean', 'running_var'):
        torch.testing.assert_close(getattr(norm, name), getattr(reference, name))
    for name in ('weight', 'bias'):
        torch.testing.assert_close(getattr(norm, name).grad, getattr(reference, name).grad)


@pytest.mark.parametrize('gamma', [0.0, 0.25, 1.0])
@pytest.mark.parametrize('training', [True, False])
def test_prepbn_output_and_gradients_match_eq_3(gamma, training):
    norm = make_norm(PRepBN, gamma, eps=1e-2, ln_eps=1e-3).train(training)
    p, x = copy_parameters(norm), tokens(requires_grad=True)
    other = x.detach().clone().requires_grad_()
    mean, var = (other.mean((0, 1)), other.var((0, 1), unbiased=False)) if training else statistics_of(norm)
    expected = formula(norm, p, other, mean, var)
    y = norm(x)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(x)
    y.backward(weight)
    expected.backward(weight)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-10)
    for name, parameter in norm.named_parameters():
        if gamma == 0 and name.startswith('ln.'):
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, p[name].grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize('gamma', [0.0, 0.5, 1.0])
def test_freezing_the_repbn_alone_freezes_statistics_at_every_gamma(gamma):
    norm, whole = make_norm(PRepBN, gamma), make_norm(PRepBN, gamma)
    whole.load_state_dict(norm.state_dict())
    # As a loop that freezes every RepBN does.
    norm.train().repbn.eval()
    whole.eval()
    before = statistics_of(norm)
    results = []
    for part in (norm, whole):
        x = torch.linspace(-3, 5, 14 * C).double().view(2, 7, C).requires_grad_()
        y = part(x)
        y.sin().sum().backward()
        results.append([y, x.grad, *(p.grad for p in part.parameters())])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True)), 'the frozen mixture'
    assert all(map(torch.equal, statistics_of(norm), before))
    norm.train()(x)
    assert not any(map(torch.equal, statistics_of(norm), before))


def test_prepbn_above_gamma_zero_has_no_affine():
    with pytest.raises(ValueError, match='LayerNorm'):
        make_norm(PRepBN, 0.5).inference_affine()


def test_set_gamma_counts_norms_and_checks_its_range():
    model = nn.Sequential(PRepBN(C), nn.LayerNorm(C), nn.Sequential(PRepBN(C), RepBN(C)))
    assert set_gamma(model, 0.5) == 2
    assert [norm.gamma for norm in model.modules() if isinstance(norm, PRepBN)] == [0.5, 0.5]
    for value in (-0.1, 1.1, float('nan')):
        with pytest.raises(ValueError, match='gamma'):
            set_gamma(model, value)


@pytest.mark.parametrize('kind', [TokenBN, RepBN, PRepBN])
def test_one_token_has_no_batch_statistics(kind):
    norm, x = make_norm(kind), torch.zeros(1, 1, C, dtype=torch.double)
    name = 'RepBN' if kind is PRepBN else kind.__name__
    with pytest.raises(ValueError, match=rf'{name}\({C}\) got .*larger images'):
        norm(x)
    assert norm.eval()(x).isfinite().all()


def test_gamma_that_an_average_wrote_past_the_setter_is_noticed():
    """EMA, SWA and mean teachers write into ``.data``, which leaves no trace at the tensor."""
    norm, x = PRepBN(4), torch.randn(2, 5, 4)
    norm._gamma.data.fill_(0.25)
    assert norm.gamma == 0.25
    norm._gamma.data.fill_(0.0)
    norm.eval()
    assert torch.equal(norm(x), norm.repbn(x))
    norm._gamma.data.fill_(0.5)
    norm.train()
    torch.testing.assert_close(norm(x), (norm.ln(x) + norm.repbn(x)) / 2)
