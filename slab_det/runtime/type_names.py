"""Names of types in configs."""

from collections.abc import Callable


def type_name(kind: str | Callable) -> str:
    """The bare name of a config's ``type``: 'mmdet.MaskRCNN', 'MaskRCNN' and the class itself all give 'MaskRCNN'."""
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__
