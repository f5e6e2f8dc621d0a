"""logs_after agrees with what mmengine's LoggerHook does."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from mmengine.hooks import LoggerHook

from slab_det.hooks.log_interval import logs_after


@pytest.mark.parametrize('ignore_last', [True, False])
@pytest.mark.parametrize('interval', [3, 4, 10])
def test_it_is_true_exactly_where_the_logger_logs(tmp_path, interval, ignore_last):
    hook = LoggerHook(interval=interval, ignore_last=ignore_last, interval_exp_name=100)
    hook.json_log_path = tmp_path / 'log.json'
    for batch_idx in range(7):
        runner = Mock(iter=batch_idx, train_dataloader=range(7), hooks=[SimpleNamespace(), hook])
        runner.log_processor.get_log_after_iter.return_value = {}, ''
        hook.after_train_iter(runner, batch_idx)
        assert logs_after(runner, batch_idx) == runner.log_processor.get_log_after_iter.called, batch_idx
