"""The steps of an absorption of norms: each is one fit, of a norm, or of a layer that writes the residual stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from slab_det.absorption.absorption_report import NormAbsorption
from slab_det.absorption.norms.pair import Pair
from slab_det.absorption.probes import Probe
from slab_det.absorption.regression import Split, diagonal_fit
from slab_det.absorption.tokens import apply_to_columns, sample_patches, sample_rows, sample_tokens
from slab_det.fusion.folding import apply_fold, fold_affine


@dataclass(frozen=True, kw_only=True)
class Step(ABC):
    """One fit.

    Attributes:
        name: The norm or layer to fit.
        source: Its input.
        target: What is fitted: the output of a norm, the residual stream behind a layer or the layer's own output.
    """

    name: str
    source: Probe
    target: Probe

    @abstractmethod
    def fit(self, pair: Pair) -> None:
        """Changes the student, and adds to the report."""


@dataclass(frozen=True, kw_only=True)
class NormStep(Step):
    """Replaces a LayerNorm by an affine map of its input, in the layers that read it."""

    def fit(self, pair: Pair) -> None:
        moments = pair.empty_moments()
        for batch in pair.batches():
            target = pair.run_teacher(batch, self.target)
            (source,) = pair.run_student(batch, self.source)
            moments.add(batch, *sample_tokens(source, target))
            # Frees the memory for the next forwards.
            del source, target
        moments.check_finite(self.name)
        fit = moments.choose_fit(diagonal_fit(moments.fitted).matrix)
        pair.report.norms.append(NormAbsorption(self.name, 'absorbed', error=moments.measured.unexplained(fit)))
        apply_fold(pair.model, pair.fusions[self.name])
        fold_affine(pair.model, pair.fusions[self.name], *fit)


@dataclass(frozen=True, kw_only=True)
class StreamStep(Step):
    """Fits a layer so that the student's stream approaches the teacher's."""

    def fit(self, pair: Pair) -> None:
        if not pair.differs():
            return
        layer, moments = pair.model.get_submodule(self.name), pair.empty_moments()
        # A convolution of a neck is fitted to its own output, which need not be computed everywhere.
        fits_own_output = self.target == Probe(self.name, 'output')
        probes = [self.source] if fits_own_output else [self.source, self.target]
        for batch in pair.batches():
            target = pair.run_teacher(batch, self.target)
            if self.name in pair.maps:
                target = torch.einsum('kc,bchw->bkhw', pair.maps[self.name].to(target), target)
            found = pair.run_student(batch, *probes)
            if isinstance(layer, nn.Conv2d) and found[0].ndim == 4:
                if target.ndim == 4:
                    found = [sample_patches(layer, found[0], target), *map(sample_rows, found[1:])]
                    target = sample_rows(target)
                else:
                    # A convolution in an FFN has kernel 1 and writes tokens.
                    found[0] = found[0].flatten(2).transpose(1, 2)
            target, source, *streamed = sample_tokens(target, *found)
            stream = apply_to_columns(layer, source) if fits_own_output else streamed[0]
            moments.add(batch, source, target - stream)
            del found, source, streamed, stream, target
        moments.check_finite(self.name)
        pair.report.refits[self.name] = refit(layer, moments)


@torch.no_grad()
def refit(layer: nn.Linear | nn.Conv2d, moments: Split) -> float:
    """Adds to a layer the affine map of its input that best explains the error of its output or of the stream.

    Args:
        layer: A linear layer, or a convolution without groups, (C_out, C_in, ...); changed in place.
        moments: Of the inputs of the layer, as columns of its flattened weight, and the error, (C_out,).

    Returns:
        The mean squared error after the fit over the mean squared error before; 1 if the layer stays as it is.
    """
    if layer.bias is None:
        # A model rebuilt from its config would have no bias here, so the fit has no shift.
        moments = moments.about_zero()
    fit, measured = moments.choose_fit(torch.zeros_like(moments.fitted.xy.T)), moments.measured
    before, after = measured.mean_square(), measured.unexplained(fit) * measured.variance()
    if after >= before:
        return 1.0
    layer.weight += fit.matrix.view_as(layer.weight)
    if layer.bias is not None:
        layer.bias += fit.shift
    return after / before
