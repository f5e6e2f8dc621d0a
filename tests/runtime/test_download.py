import pytest
from mmengine.runner.checkpoint import CheckpointLoader

from slab_det.runtime.errors import CheckpointError


def test_a_failed_download_says_how_to_go_on():
    # Port 9 of this machine: nothing listens there.
    with pytest.raises(CheckpointError, match=r'cannot be downloaded .*init_cfg\.checkpoint=FILE'):
        CheckpointLoader.load_checkpoint('http://127.0.0.1:9/swin.pth', map_location='cpu')
