"""Measures detectors: latency, cost, AP and its loss; writes reports and pictures.

Imports nothing, so that ``--help`` lists :data:`SCOPES` without importing torch.
"""

# Scope of a latency measurement: the work inside the timed region.
SCOPES = {
    'backbone': 'backbone forward on a normalised, padded image',
    'backbone+neck': 'backbone and neck forward on a normalised, padded image',
    'detector': 'prediction on a normalised, padded image: backbone, neck, all heads, NMS, masks pasted to full size; '
    'without image decoding, resizing and normalisation',
    'end-to-end': 'from the bytes of the image file in memory to predictions on the original image: decoding, '
    'resizing, normalisation, padding, copy to the device, backbone, neck, all heads, NMS, masks pasted to full size',
}
