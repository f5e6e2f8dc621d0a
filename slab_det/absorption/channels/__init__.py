"""The channels of an absorption: what each costs, which go, and the fit of what is left.

- **unit**: hidden channels that go together (:class:`slab_det.fusion.Channels`); torch-pruning calls it a group.
- **kind**: the units of FFNs, of attention, of maps inside or behind the neck, or of one head. A kind has one price.
- **survey**: statistics of the teacher, the estimated loss of each unit by its number of channels, and multiply-adds.
- **draft**: a student that is fitted on one half of the images, to be evaluated on the other.
- **price**: the share of the AP that drafts lose, as a function of the estimated losses of a kind.
- **judge**: evaluates students without labels, by the teacher's detections in mirrored images
  (:mod:`slab_det.compare.ruler`).

The call order is observed, estimates and survey, prices with the judge, then pruning.
"""
