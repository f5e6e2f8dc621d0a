"""A small norm study driven as benchmarks/norms/run.py does it, with a kill, a failure and a changed definition."""

import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import CONFIGS
from mmdet.datasets.transforms import Resize
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper

from benchmarks.experiments import ROOT, attempts, replace_table
from benchmarks.interruptions import FORK_SERVER, run_in_this_process
from benchmarks.norms import figure, latency
from benchmarks.norms import jobs as jobs_module
from benchmarks.norms.claim import claimed, holder
from benchmarks.norms.jobs import Job, Training, jobs_of, last_line
from benchmarks.norms.no_eta import NoEtaHook
from benchmarks.norms.results import collect
from benchmarks.norms.run import Driver
from benchmarks.norms.studies import STUDIES, Base, Recalibration, Run, Study, lasting, norm, prepbn
from benchmarks.norms.table import T_QUANTILES, markdown, t_interval
from slab_det.data import generate
from slab_det.measure.figures import draw_ap_latency
from slab_det.measure.reporting import read_report

ITERATIONS = 4


class Processes:
    """Starts commands in processes forked from one that has imported torch; kills one with SIGKILL where asked."""

    def __init__(self) -> None:
        self.started: list[str] = []
        # A part of the command, and the text in its output after which it is killed.
        self.kill: tuple[str, str] | None = None

    def start(self, command, stdout, cwd, **options):
        text = ' '.join(command)
        self.started.append(text)
        (descriptor,) = options['pass_fds']
        assert os.path.samestat(os.fstat(descriptor), os.stat(Path(stdout.name).with_name('claim')))
        if 'unknown/seed0' in text:
            # This one as outside of tests, for its environment and its exit code.
            return subprocess.Popen(command, stdout=stdout, cwd=cwd, **options)
        process = FORK_SERVER.Process(target=run_in_this_process, args=(command[1], command[2:], str(cwd), stdout.name))
        process.start()
        said = self.kill[1] if self.kill and self.kill[0] in text else None

        def wait() -> int:
            while process.is_alive():
                if said and said in Path(stdout.name).read_text():
                    process.kill()
                time.sleep(0.005)
            process.join()
            return process.exitcode

        return SimpleNamespace(wait=wait, poll=lambda: process.exitcode, terminate=process.terminate)


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    """A study of four iterations with a run that fails, one on recalibration, and the folder for both."""
    folder = tmp_path_factory.mktemp('norms')
    cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_swin.py')
    cfg.model.backbone.update(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
    cfg.model.neck.in_channels = [8, 16, 32, 64]
    cfg.model.test_cfg.rpn.max_per_img = cfg.model.train_cfg.rpn_proposal.max_per_img = 50
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.num_workers = 0
        loader.persistent_workers = False
    cfg.train_dataloader.batch_size = 2
    cfg.dump(folder / 'base.py')
    generate(folder / 'data', num_train=8, num_val=2, size=(96, 80))
    changes = lasting(1000, 5)
    changes['train_cfg'] = dict(max_iters=ITERATIONS, val_interval=2)
    changes['default_hooks']['checkpoint']['interval'] = 2
    changes['default_hooks']['logger']['interval'] = 1
    base = Base('tiny', folder / 'base.py', 'segm', changes, '8 generated images')
    layer_norm = Run('ln', 'LayerNorm')
    progressive = Run('prepbn', 'PRepBN', (prepbn(recalibration_images=2),), keep_trained=True)
    study = Study(
        'tiny', base, '?', (layer_norm, progressive, Run('unknown', 'Unknown', (norm(dict(type='NoSuchNorm')),)))
    )
    recalibration = Study(
        'tiny-recalibration',
        base,
        '?',
        (progressive,),
        tuple(Recalibration(progressive, *how) for how in ((0,), (4,), (4, 1), (4, None, 'train'))),
    )
    (folder / 'docs').mkdir()
    (folder / 'docs' / 'results.md').write_text('Before.\n\n<!-- norms tiny -->\n\nAfter.\n')
    return SimpleNamespace(folder=folder, study=study, recalibration=recalibration)


@pytest.fixture(scope='module')
def driven(tiny):
    """The study, started three times, the first time with a kill; and what each start ran and could not end."""
    processes, starts = Processes(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs_module, 'start', processes.start)
        for kill in (('prepbn/seed0/', f'Iter(train) [3/{ITERATIONS}]'), None, None):
            processes.started, processes.kill = [], kill
            problems = driver(tiny, tiny.study).run(parallel=2)
            starts.append(SimpleNamespace(started=processes.started, problems=problems))
        driver(tiny, tiny.study).publish()
        processes.started = []
        assert not driver(tiny, tiny.recalibration, seeds=(0,)).run()
    return SimpleNamespace(first=starts[0], second=starts[1], third=starts[2], **vars(tiny))


def driver(tiny, study, seeds=(0, 1)):
    return Driver(study, list(seeds), tiny.folder / 'work', str(tiny.folder / 'data'), tiny.folder)


def names(started):
    """Run and seed of each command."""
    return [re.search(r'--work-dir \S*/work/tiny/(\S+)', text)[1] for text in started]


def results_of(driven, study):
    return json.loads((driven.folder / f'benchmarks/results/norms_{study.name}.json').read_text())


def test_a_killed_run_goes_on_and_finished_ones_are_left_alone(driven):
    assert sorted(names(driven.first.started)) == [
        'ln/seed0',
        'ln/seed1',
        'prepbn/seed0',
        'prepbn/seed1',
        'prepbn/seed1',
        'unknown/seed0',
        'unknown/seed1',
    ]
    assert any(problem.startswith('tiny/prepbn seed 0 was ended by signal 9') for problem in driven.first.problems)
    # Its training, then recalibration and fusion.
    assert names(driven.second.started) == ['prepbn/seed0'] * 2
    folder = driven.folder / 'work' / 'tiny' / 'prepbn' / 'seed0'
    output = (folder / 'output.txt').read_text()
    assert 'Auto resumed from the latest checkpoint' in output and 'iter_2.pth' in output
    assert [record['step'] for record in attempts(folder)[0] if 'loss' in record][:2] == [1, 2], 'before the kill'
    assert [record['step'] for record in attempts(folder)[1] if 'loss' in record] == [3, 4], 'resumed'
    assert driven.third.started == []


def test_a_failing_run_is_reported_each_time_and_stops_nothing(driven):
    for start in (driven.first, driven.second, driven.third):
        failed = [problem for problem in start.problems if 'unknown' in problem]
        assert len(failed) == 2 and all("there is no norm called 'NoSuchNorm'" in problem for problem in failed)
    assert len(driven.second.problems) == len(driven.third.problems) == 2
    run = results_of(driven, driven.study)['runs']['unknown']
    assert run['seeds']['1']['status'] == 'failed'
    # No path of this machine.
    assert str(driven.folder) not in json.dumps(run)
    assert 'seed 1 failed' in (driven.folder / 'docs' / 'results.md').read_text()


def test_results_are_what_the_runs_measured(driven, tmp_path):
    # Four iterations find nothing. So that one AP is not taken for another, others are put in their places.
    work = shutil.copytree(driven.folder / 'work', tmp_path / 'work')
    values = iter(range(1, 100))
    for file in [*work.glob('tiny/*/seed?/report.json'), *work.glob('tiny/*/seed?/*/vis_data/scalars.json')]:
        file.write_text(
            re.sub(
                r'("AP"|"coco/segm_mAP"): [^,}]+', lambda found: f'{found[1]}: {next(values) / 100}', file.read_text()
            )
        )
    runs = collect(driven.study, work, '')['runs']
    for seed in ('0', '1'):
        folder = work / 'tiny' / 'prepbn' / f'seed{seed}'
        unfused = read_report(folder / 'report.json').entries[0]
        found = runs['prepbn']['seeds'][seed]
        assert found['ap'] == unfused.ap['segm']['AP'] and found['all_ap'] == unfused.ap
        assert found['recalibration']['residuals'] == unfused.recalibration['residuals']
        training, validations = found['training'], found['validations']
        assert training['iteration'] == [1, 2, 3, 4] and validations['iteration'] == [2, 4]
        assert training['gamma'] == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=1e-4)
        assert len(training['drift_mean']) == len(training['drift_log_var']) == 4 and min(training['drift_mean']) > 0
        assert found['ap_before_recalibration'] == validations['ap'][-1] != found['ap']
        layer_norm = runs['ln']['seeds'][seed]
        logged = (next(work.glob(f'tiny/ln/seed{seed}/*/vis_data/scalars.json'))).read_text()
        aps = [float(value) for value in re.findall(r'"coco/segm_mAP": ([^,]+)', logged)]
        assert layer_norm['validations']['ap'] == aps and layer_norm['ap'] == aps[-1] > aps[0] > 0
    # Of every loss that the runner printed; its log has four digits.
    output = (work / 'tiny' / 'ln' / 'seed1' / 'output.txt').read_text()
    printed = [float(loss) for loss in re.findall(r'Iter\(train\).*?  loss: (\S+)', output)]
    assert runs['ln']['seeds']['1']['training']['loss'] == pytest.approx(printed, abs=1e-3) and len(printed) == 4
    page = (driven.folder / 'docs' / 'results.md').read_text()
    assert page.startswith('Before.\n\n<!-- norms tiny -->\n| run |') and page.endswith(' |\n\nAfter.\n')
    assert (driven.folder / 'docs' / 'results_tiny.png').stat().st_size > 10_000


def test_stored_results_stay_where_asked(driven, tmp_path, monkeypatch):
    """Folders of runs are large and go sooner or later; a seed that is added later must not cost the others."""
    everything = results_of(driven, driven.study)
    work = shutil.copytree(driven.folder / 'work', tmp_path / 'work')
    for folder in (work / 'tiny' / 'ln', work / 'tiny' / 'prepbn' / 'seed0'):
        shutil.rmtree(folder)
    options = (driven.study, [0, 1], work, str(driven.folder / 'data'), tmp_path)
    stored = tmp_path / 'benchmarks' / 'results'
    shutil.copytree(driven.folder / 'benchmarks' / 'results', stored)
    old = json.loads((stored / 'norms_tiny.json').read_text())
    # What is still there counts more than what was stored of it.
    old['runs']['prepbn']['seeds']['1']['ap'] = 0.99
    old['environments'] = [dict(device='another')]
    (stored / 'norms_tiny.json').write_text(json.dumps(old))
    kept = Driver(*options, keep_stored=True).collect()
    assert kept['runs'] == everything['runs'] and list(kept['runs']) == list(everything['runs'])
    assert kept['environments'] == [*everything['environments'], dict(device='another')]
    assert json.loads((stored / 'norms_tiny.json').read_text()) == kept == Driver(*options, keep_stored=True).collect()
    # A run of the same name in another study of the dataset is the same run.
    other = dataclasses.replace(driven.study, name='tiny-other', runs=driven.study.runs[:2])
    monkeypatch.setitem(STUDIES, 'tiny', driven.study)
    assert Driver(other, *options[1:], keep_stored=True).collect()['runs'] == {
        run.name: everything['runs'][run.name] for run in other.runs
    }
    assert 'ln' not in Driver(*options).collect()['runs']


def test_checkpoints_before_and_after_recalibration_are_kept_and_compared(driven):
    folder = driven.folder / 'work' / 'tiny' / 'prepbn' / 'seed0'
    before, after, on_four = (
        torch.load(file, weights_only=False)['state_dict']
        for file in (folder / 'trained.pth', folder / 'iter_4.pth', folder / 'recalibrated_4' / 'recalibrated.pth')
    )
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved and all(key.endswith(('running_mean', 'running_var')) for key in moved)
    seeds = results_of(driven, driven.recalibration)['runs']
    assert (
        seeds['prepbn@0']['seeds']['0']['ap']
        == results_of(driven, driven.study)['runs']['prepbn']['seeds']['0']['ap_before_recalibration']
    )
    shifts = [
        (
            (on_four[key].double() - before[key].double()).abs()
            / (before[key.replace('mean', 'var')].double() + 1e-5).sqrt()
        )
        for key in before
        if key.endswith('running_mean')
    ]
    ratios = [
        ((on_four[key].double() + 1e-5) / (before[key].double() + 1e-5)).log().abs()
        for key in before
        if key.endswith('running_var')
    ]
    assert seeds['prepbn@4']['seeds']['0']['recalibration']['converged']
    assert seeds['prepbn@4x1']['seeds']['0']['recalibration']['passes'] == 1
    # Two to a batch, as in training.
    batches = {
        name: seeds[name]['seeds']['0']['recalibration']['num_batches'] for name in ('prepbn@4', 'prepbn@4-train')
    }
    assert batches == {'prepbn@4': 4, 'prepbn@4-train': 2}
    drift = seeds['prepbn@4']['seeds']['0']['recalibration']['drift']
    assert drift['mean'] == pytest.approx(torch.cat(shifts).mean().item(), rel=1e-6)
    assert drift['largest_log_var'] == pytest.approx(torch.cat(ratios).max().item(), rel=1e-6)


def test_a_recalibration_starts_from_the_last_checkpoint_where_none_was_kept(driven, tmp_path):
    work = shutil.copytree(driven.folder / 'work', tmp_path / 'work')
    folder = work / 'tiny' / 'prepbn' / 'seed0'
    jobs = {job.name: job for job in jobs_of(driven.recalibration, [0], work, 'data')}
    starts = {}
    for kept in (True, False):
        if not kept:
            (folder / 'trained.pth').unlink()
            assert jobs['prepbn@0'].obstacle().startswith('waits for')
        assert jobs['prepbn@4'].obstacle() is None
        starts[kept] = next(jobs['prepbn@4'].commands())
    runs = collect(driven.recalibration, work, 'data')['runs']
    assert 'prepbn@4' in runs and 'drift' not in runs['prepbn@4']['seeds']['0']['recalibration']
    assert str(folder / 'trained.pth') in starts[True] and str(folder / 'iter_4.pth') in starts[False]
    (folder / 'done').unlink()
    assert jobs['prepbn@4'].obstacle().startswith('waits for')


def test_latency_leaves_out_what_was_trained_with_another_config(driven, tmp_path):
    work = tmp_path / 'work'
    shutil.copytree(driven.folder / 'work', work)
    for done in work.glob('*/prepbn/seed0/done'):
        done.write_text(json.dumps({**json.loads(done.read_text()), 'config': 'another'}))
    data = str(driven.folder / 'data')
    measured = latency.measure(driven.study, [0], work, data, rounds=1, threads=1)
    assert [*measured] == ['ln']
    # Of the first seed that counts.
    measured = latency.measure(driven.study, [0, 1], work, data, rounds=1, threads=1)
    assert {name: found['seed'] for name, found in measured.items()} == {'ln': 0, 'prepbn': 1}


def test_latency_is_measured_at_the_size_that_testing_makes():
    dataset = SimpleNamespace(
        get_data_info=lambda _: dict(img_path='photo.png', height=256, width=320),
        pipeline=SimpleNamespace(transforms=[Resize(scale=(512, 512), keep_ratio=True)]),
    )
    assert latency.first_image(dataset) == ('photo.png', (410, 512))
    dataset.pipeline.transforms.clear()
    assert latency.first_image(dataset) == ('photo.png', (256, 320))


def test_latency_is_that_of_what_each_run_serves_beside_its_mean_ap(driven, tmp_path):
    runs = results_of(driven, driven.study)['runs']
    # Four iterations find nothing.
    for value, run in enumerate((runs['ln'], runs['prepbn']), start=1):
        for seed, result in run['seeds'].items():
            result['ap'] = value / 10 + int(seed) / 100
    data = str(driven.folder / 'data')
    measured = latency.measure(driven.study, [0], driven.folder / 'work', data, rounds=3, threads=1)
    assert {name: found['variant'] for name, found in measured.items()} == {'ln': 'unfused', 'prepbn': 'fused'}
    for scope in ('backbone+neck', 'detector'):
        found = measured['prepbn']['latency'][scope]
        assert (found['scope'], found['interleaved'], found['rounds']) == (scope, ['ln', 'prepbn'], 3)
        assert found['image'].endswith('.png') and found['size'] == [160, 192]
        measured['ln']['latency'][scope]['median_ms'], found['median_ms'] = 20.0, 15.0
    assert latency.markdown(runs, measured, 'AP').splitlines()[2:] == [
        '| LayerNorm | 0.105 | 20.0 | 1.00 | 20.0 | 1.00 |',
        '| PRepBN | 0.205 | 15.0 | 0.75 | 15.0 | 0.75 |',
    ]
    entries = latency.entries(driven.study, runs, measured)
    assert [(entry.variant, entry.ap['segm']['AP']) for entry in entries] == [
        ('unfused', pytest.approx(0.105)),
        ('fused', pytest.approx(0.205)),
    ]
    draw_ap_latency(entries, tmp_path / 'latency.png')
    assert (tmp_path / 'latency.png').stat().st_size > 10_000


def test_runs_that_were_validated_once_are_drawn_side_by_side(driven, tmp_path, monkeypatch):
    results = results_of(driven, driven.study)
    for index, run in enumerate(results['runs'].values()):
        for seed, result in run['seeds'].items():
            # Four iterations find nothing.
            result['ap'] = index / 10 + int(seed) / 100
            for values in result.get('validations', {}).values():
                del values[:-1]
    drawn = Mock()
    monkeypatch.setattr(figure, '_draw_points', drawn)
    figure.draw(results, tmp_path / 'points.png')
    # The third run failed before it logged anything.
    assert [call.args[1:3] for call in drawn.call_args_list] == [(0, [0.0, 0.01]), (1, [0.1, 0.11])]


def test_another_definition_is_noticed_and_spoils_nothing(driven, monkeypatch):
    processes = Processes()
    monkeypatch.setattr(jobs_module, 'start', processes.start)
    faster = dataclasses.replace(driven.study.runs[0], changes=(dict(optim_wrapper=dict(optimizer=dict(lr=1e-3))),))
    study = dataclasses.replace(driven.study, name='changed', runs=(faster, driven.study.runs[1]))
    problems = driver(driven, study).run()
    assert not processes.started
    assert len(problems) == 2 and all(
        'was trained with another config (optim_wrapper.optimizer.lr)' in problem for problem in problems
    )
    assert list(results_of(driven, study)['runs']) == ['prepbn']
    # How a run is logged is not what it is.
    logged = dataclasses.replace(study.base, changes={**study.base.changes, 'log_processor': dict(window_size=3)})
    assert not driver(driven, dataclasses.replace(study, base=logged, runs=driven.study.runs[:2])).run()


class Sleeping(Job):
    """A job that would sleep for a minute."""

    fingerprint = 'sleep'

    def commands(self):
        yield ['sleep', '60']


def test_a_claim_lasts_as_long_as_the_driver_or_its_training(tmp_path, tiny):
    job = Sleeping(tiny.study.base, 'sleep', 0, tmp_path, '')
    script = (
        'import sys, time; from pathlib import Path; from benchmarks.norms.claim import claimed\n'
        'with claimed(Path(sys.argv[1])) as claim: print(claim is not None, flush=True); time.sleep(60)'
    )
    other = subprocess.Popen([sys.executable, '-c', script, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert other.stdout.readline() == 'True\n'
        assert job.run(1) == f'belongs to process {other.pid} or to a training that it started'
    finally:
        other.kill()
        other.wait()
    # The driver is gone, but not what it started.
    with claimed(tmp_path) as descriptor:
        assert descriptor is not None and holder(tmp_path) == str(os.getpid())
        child = subprocess.Popen(['sleep', '60'], pass_fds=[descriptor])
    try:
        with claimed(tmp_path) as second:
            assert second is None
    finally:
        child.kill()
        child.wait()
    with claimed(tmp_path) as third:
        assert third is not None


def test_an_interrupted_driver_ends_its_trainings_and_starts_no_more(tmp_path, tiny, monkeypatch):
    jobs = [Sleeping(tiny.study.base, f'sleep{i}', 0, tmp_path / str(i), '') for i in range(3)]
    driving = driver(tiny, tiny.study)
    monkeypatch.setattr(driving, '_report', lambda *_: None)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            driving._run_all(jobs, jobs, 2, {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - begin < 20
    assert not (tmp_path / '2').exists() and not any(job.done for job in jobs)


def test_runs_beside_each_other_have_one_thread_each(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '7')
    for parallel, threads in ((1, '7'), (2, '1')):
        job = Sleeping(tiny.study.base, 'threads', 0, tmp_path / str(parallel), '')
        monkeypatch.setattr(job, 'commands', lambda: iter([['printenv', 'OMP_NUM_THREADS']]))
        assert job.run(parallel).status == 'finished'
        assert job.output.read_text().split() == [threads]


def finished(**ap):
    return {seed.removeprefix('s'): dict(status='finished', ap=value) for seed, value in ap.items()}


def test_table_compares_seed_by_seed():
    control, other = [0.512, 0.498, 0.530], [0.505, 0.499, 0.502]
    runs = dict(
        ln=dict(
            label='LayerNorm', setting='', control='ln', seeds=finished(s0=control[0], s1=control[1], s10=control[2])
        ),
        bn=dict(label='BN', setting='deep', control='ln', seeds=finished(s10=other[2], s0=other[0], s1=other[1])),
        un=dict(
            label='UN',
            setting='',
            control='ln',
            seeds={**finished(s1=0.4), '0': dict(status='failed', error='AssertionError | NaN')},
        ),
    )
    first, second, third = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in markdown(dict(metric='box AP', runs=runs)).splitlines()[2:]
    ]
    assert first == ['LayerNorm', '0.512, 0.498, 0.530', '0.513 ± 0.016', '–', '–', '–']
    difference = [b - a for a, b in zip(control, other, strict=True)]
    mean = sum(difference) / 3
    std = (sum((value - mean) ** 2 for value in difference) / 2) ** 0.5
    half = 4.303 * std / 3**0.5
    assert second == [
        'deep: BN',
        '0.505, 0.499, 0.502',
        '0.502 ± 0.003',
        '-0.007, +0.001, -0.028',
        f'{mean:+.3f} ± {std:.3f}',
        f'[{mean - half:+.3f}, {mean + half:+.3f}]',
    ]
    # Its only seed beside that of the control; two seeds have no interval.
    assert third == ['UN', '0.400; seed 0 failed: AssertionError / NaN', '0.400', '-0.098', '-0.098', '–']
    assert t_interval(difference[:2]) is None


@pytest.mark.parametrize('freedom', T_QUANTILES)
def test_quantiles_leave_a_fortieth_in_the_tail(freedom):
    # The density of Student's t, integrated by the midpoint rule.
    steps = 200_000
    width = T_QUANTILES[freedom] / steps
    x = (torch.arange(steps, dtype=torch.float64) + 0.5) * width
    log_scale = torch.lgamma(torch.tensor((freedom + 1) / 2)) - torch.lgamma(torch.tensor(freedom / 2))
    density = log_scale.double().exp() / (freedom * torch.pi) ** 0.5 * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    assert 0.5 + (density.sum() * width).item() == pytest.approx(0.975, abs=5e-5)


def test_only_the_rows_below_the_mark_are_replaced(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('a | b\n<!-- one -->\n| old |\n| rows |\n\nwords\n<!-- two -->\n| last |\n')
    assert replace_table(page, 'one', '| new |') and replace_table(page, 'two', '| end |\n| end |')
    assert page.read_text() == 'a | b\n<!-- one -->\n| new |\n\nwords\n<!-- two -->\n| end |\n| end |\n'
    assert not replace_table(page, 'three', '| none |')


def test_what_a_killed_run_was_logging_is_no_record(tmp_path):
    for name, text in (('2', '{"loss": 2.0, "step": 3}\n'), ('1', '{"loss": 3.0, "step": 1}\n{"loss": 2.5, "st')):
        (tmp_path / name / 'vis_data').mkdir(parents=True)
        (tmp_path / name / 'vis_data' / 'scalars.json').write_text(text)
    assert attempts(tmp_path) == [[dict(loss=3.0, step=1)], [dict(loss=2.0, step=3)]]


def test_a_failure_is_told_by_its_last_line_and_what_was_logged(tmp_path):
    output = tmp_path / 'output.txt'
    logged = '11/21 12:00:00 - mmengine - INFO - '
    output.write_text(
        f'{logged}Iter(train) [ 20/800]\n{logged}loss become infinite or NaN!\nTraceback\n  x\nAssertionError: None\n\n'
    )
    assert last_line(output) == 'AssertionError: None; last logged: loss become infinite or NaN!'
    output.write_text(f'{logged}Iter(train) [ 20/800]\nerror: no data\n')
    assert last_line(output) == 'error: no data'
    output.write_text('')
    assert last_line(output) == ''


def test_declared_studies_are_consistent():
    trainings: dict[tuple[str, str], Training] = {}
    for study in STUDIES.values():
        declared = [run.name for run in (*study.runs, *study.recalibrations)]
        assert len(declared) == len(set(declared)), study.name
        for run in (*study.runs, *study.recalibrations):
            if not (study.recalibrations and isinstance(run, Run)):
                assert run.control in declared, f'{study.name}: {run.name} has no control'
        for job in jobs_of(study, [0], Path('unused'), 'unused'):
            if not isinstance(job, Training):
                continue
            # What studies share is the same.
            known = trainings.setdefault((study.base.name, job.name), job)
            assert known.fingerprint == job.fingerprint and known.definition == job.definition, job.name
            iterations = job.config.train_cfg.max_iters
            assert job.config.param_scheduler[-1].end == iterations
            warmup = job.config.model.backbone.norm_cfg.get('warmup_iters')
            assert warmup is None or warmup == iterations // 10, job.name
    assert len({training.fingerprint for training in trainings.values()}) == len(trainings), 'two names, one run'


def test_every_declared_backbone_can_be_built():
    backbones = {}
    for study in STUDIES.values():
        for job in jobs_of(study, [0], Path('unused'), 'unused')[: len(study.runs)]:
            backbones[json.dumps(job.config.model.backbone)] = job
    for job in backbones.values():
        model = MODELS.build(job.config.model.backbone)
        assert type(model.stages[0].blocks[0].norm1).__name__ in ('LayerNorm', job.config.model.backbone.norm_cfg.type)
        features = model.eval()(torch.zeros(1, 3, 64, 64))
        assert [f.shape[1] for f in features] == job.config.model.neck.in_channels, job.name


@pytest.mark.parametrize('study', ['bccd-choices', 'dsb2018-choices'])
def test_multipliers_reach_the_parameters_they_name(study):
    jobs = {job.name: job for job in jobs_of(STUDIES[study], [0], Path('unused'), 'unused')}
    for name, lr_of_eta, decay_of_norms in (
        ('prepbn', 5e-4, 0),
        ('prepbn_eta_lr_10', 5e-3, 0),
        ('prepbn_weight_decay', 5e-4, 0.05),
    ):
        model = MODELS.build(jobs[name].config.model)
        optimizer = build_optim_wrapper(model, jobs[name].config.optim_wrapper).optimizer
        groups = {id(group['params'][0]): group for group in optimizer.param_groups}
        for key, parameter in model.backbone.named_parameters():
            if '.norm' in key or key.startswith('norm'):
                group = groups[id(parameter)]
                assert group['lr'] == pytest.approx(lr_of_eta if key.endswith('eta') else 5e-4), (name, key)
                assert group['weight_decay'] == decay_of_norms, (name, key)


def test_without_eta_the_repbn_is_batchnorm():
    model = MODELS.build(
        dict(
            type='SLABSwin',
            embed_dims=8,
            depths=(1, 1),
            num_heads=(1, 2),
            strides=(4, 2),
            out_indices=(0, 1),
            norm_cfg=dict(type='RepBN'),
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    NoEtaHook().before_train(SimpleNamespace(model=model))
    for _ in range(2):
        optimizer.zero_grad()
        sum(feature.square().sum() for feature in model(torch.randn(2, 3, 32, 32))).backward()
        optimizer.step()
    etas = [parameter for name, parameter in model.named_parameters() if name.endswith('eta')]
    assert len(etas) == 8 and not any(map(torch.count_nonzero, etas))
    x = torch.randn(2, 5, 8)
    norm1 = model.stages[0].blocks[0].norm1
    mean, var = x.flatten(0, 1).mean(0), x.flatten(0, 1).var(0, unbiased=False)
    expected = (x - mean) / (var + norm1.eps).sqrt() * norm1.weight + norm1.bias
    torch.testing.assert_close(norm1(x), expected)


def test_std_is_the_sample_standard_deviation():
    low, high = t_interval([0.0, 1.0, 2.0, 3.0])
    assert (high - low) / 2 == pytest.approx(3.182 * statistics.stdev([0.0, 1.0, 2.0, 3.0]) / 2)
