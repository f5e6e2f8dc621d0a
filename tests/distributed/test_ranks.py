"""Checks the notes of the four gloo processes of ranks.py."""

import pytest
from ranks import NUM_RANKS, run_all


@pytest.fixture(scope='module')
def ranks(tmp_path_factory, module_run_cfg):
    return run_all(tmp_path_factory.mktemp('ranks'), module_run_cfg(max_iters=1))


def of_all(ranks, *keys):
    """One entry of what each process wrote."""
    for key in keys:
        ranks = [rank[key] for rank in ranks]
    return ranks


def all_equal(values):
    return all(value == values[0] for value in values)


def stops_all(errors, rank, kind, text):
    """Whether one process had this error and the others one that names the process and repeats the error."""
    own = errors.pop(rank)
    assert own[0] == kind and text in own[1]
    for name, message in errors:
        assert name == 'RankError' and f'process {rank} of {NUM_RANKS} failed' in message
        assert kind in message and text in message
    return True


def test_the_launcher_takes_gloo_where_there_is_no_gpu_and_says_so(ranks):
    for found in of_all(ranks, 'launch'):
        assert found['backend'] == 'gloo'
        assert [text for text in found['warnings'] if 'There is no GPU' in text and 'gloo instead of nccl' in text]


def test_norms_of_several_processes_are_those_of_one_whatever_the_shares(ranks):
    for found in of_all(ranks, 'norms'):
        assert len(found) == 6
        for norm, distances in found.items():
            assert {'output', 'input gradient', 'weight', 'running_var'} <= distances.keys()
            assert all(distance < 1e-10 for distance in distances.values()), (norm, distances)


def test_recalibration_finds_what_one_process_finds_on_all_images(ranks):
    assert all_equal(of_all(ranks, 'recalibration'))
    found = ranks[0]['recalibration']
    assert found['batches'] == 6 and len(found['residuals']) == 3
    assert len(found['distances']) == 40 and all(distance < 1e-9 for distance in found['distances']), found
    assert min(found['residuals']) > 1e-3, 'every pass had something to find'


def test_values_that_are_not_finite_on_one_stop_the_recalibration_of_all(ranks):
    for kind, text in of_all(ranks, 'failed recalibration', 'error'):
        assert kind == 'RecalibrationError' and 'patch_embed.norm: mean or variance is NaN' in text
    assert all(of_all(ranks, 'failed recalibration', 'unchanged'))


def test_a_download_that_fails_stops_all(ranks):
    assert stops_all(of_all(ranks, 'failed download'), 0, 'CheckpointError', 'cannot be downloaded')


def test_all_train_the_model_that_the_main_process_saves(ranks):
    found = of_all(ranks, 'training')
    assert found[0]['saved'] == found[0]['states'][2]
    for key in ('parameters', 'gammas'):
        assert found[0][key] and all_equal(of_all(found, key)), key
    assert found[0]['gammas'] == [[1], [0.75], [0.5], [0.25], [0], [0]]
    assert not any(of_all(found, 'find_unused'))
    assert of_all(found, 'files') == [2, 0, 0, 0]


def test_loader_workers_of_no_two_processes_draw_alike(ranks):
    """PyTorch gives them the seed that a loader draws, and mmengine's worker_init_fn may be another."""
    assert len(set(of_all(ranks, 'training', 'worker seed'))) == NUM_RANKS


def test_processes_do_not_start_apart_when_only_one_finds_the_checkpoint(ranks):
    for name, message in of_all(ranks, 'training', 'resume'):
        assert name == 'SlabDetError' and 'start at iterations [6, 0, 0, 0]' in message


def test_an_error_at_the_end_of_a_run_stops_all_and_leaves_the_checkpoint(ranks):
    assert stops_all(of_all(ranks, 'end of run', 'data'), 3, 'DataError', 'images/7.png is missing')
    assert stops_all(of_all(ranks, 'end of run', 'disk'), 0, 'OSError', 'No space left')
    assert all(of_all(ranks, 'end of run', 'intact')) and not any(of_all(ranks, 'end of run', 'early'))
