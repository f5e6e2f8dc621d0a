"""The forms in which a detector can run, what was measured of each, and the folder that serves the chosen one.

The words of this package:

- form: how a detector runs: its runtime, precision and variant, such as 'openvino-bfloat16-channels50'. ``BASE`` is the
  form of the original detector in eager PyTorch.
- variant: what absorption removed: hidden channels (structured pruning), LayerNorms, or both.
- round: one image that every measured form predicts in turn (interleaved timing). Times are compared within a round.
- truth: what the original detector finds in a mirrored image: pseudo-labels, from which the loss of AP is estimated.
- standing: the ranking so far: which forms are dropped, and which one is chosen.
- step: what is not begun after the deadline: making one file of a form, loading a form, a further round.
"""
