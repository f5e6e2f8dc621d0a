# The papers' training sizes: 480 to 800 on the short side, and the random crop of DETR in half of the images.
multi_scale = dict(type='RandomChoiceResize', scales=[(side, 1333) for side in range(480, 801, 32)], keep_ratio=True)
ms_crop = dict(
    type='RandomChoice',
    transforms=[
        [multi_scale],
        [
            dict(type='RandomChoiceResize', scales=[(400, 1333), (500, 1333), (600, 1333)], keep_ratio=True),
            dict(type='RandomCrop', crop_type='absolute_range', crop_size=(384, 600), allow_negative_crop=True),
            multi_scale,
        ],
    ],
)
