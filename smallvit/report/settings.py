"""Settings of the arms: how each differs from its baseline, which hyperparameter was varied, and what was tuned."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from smallvit.components import describe_value, differences
from smallvit.record import Record
from smallvit.tuning import is_extreme
from smallvit.verdicts.comparison import Comparison, condition_of

MIN_VALUES = 3  # values of a hyperparameter that are worth a figure; two are shown better as a paired difference
NAMES = {"dim": "width", "lr": "learning rate", "mlp_ratio": "MLP ratio"}


def at_common_settings(records: Sequence[Record]) -> list[Record]:
    """Return the records without the tuned ones of those arms (variants) that have others, too."""
    untuned = {r.arm for r in records if r.tuning is None}
    return [r for r in records if r.tuning is None or r.arm not in untuned]


def option_name(path: str) -> str:
    """Return the name of an option for readers: `lr` becomes "learning rate", and `model.mlp_ratio` becomes "MLP ratio"."""
    last = path.rpartition(".")[2]
    return NAMES.get(last, last.replace("_", " "))


def option_names(paths: Iterable[str]) -> dict[str, str]:
    """Return a dict from the path of each option to a name for readers that no other one has, as short as possible.
    `model.dropout` alone becomes "dropout". Beside `model.block.dropout`, the two are "model dropout" and "block dropout".
    """
    paths = list(paths)
    names = {path: option_name(path) for path in paths}
    for outer in range(1, max((path.count(".") for path in paths), default=0) + 1):
        times = Counter(names.values())
        longer = {path: path.split(".")[-1 - outer : -1] for path in paths if times[names[path]] > 1}
        names |= {path: " ".join([*parts, option_name(path)]).replace("_", " ") for path, parts in longer.items()}
    times = Counter(names.values())
    return {path: name if times[name] == 1 else path for path, name in names.items()}


def changes(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[str]]:
    """Return a dict from the name of each arm (variant) to a list of the settings in which it differs from its baseline, such
    as `tokenizer: PatchEmbed → ConvStem`. `records` are the results of the runs. If an arm has another control than the
    baseline, the differences are those from this control, which is named.

    The runs that are compared have the same condition (number of labelled images and training length) and the same seed. Of an
    arm with tuned runs and others, the tuned ones are left out, because each arm has its own tuned settings.
    """
    records = at_common_settings(records)
    sources, group_of = initial_weights(records), {row.arm: row.group for row in comparison.rows}
    count: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    for r, base in with_baselines(comparison, records):
        count[r.arm] += 1
        lines = found.setdefault(r.arm, Counter())
        for path, values in changed_options(base.run, r.run).items():
            texts = [describe_value(value) for value in values]
            if path == "init":
                texts = [sources.get(run.arm, text) for run, text in zip((base, r), texts)]
            if path == "model":  # the options of the baseline's model are no difference
                texts[0] = texts[0].partition("(")[0]
            control = f" (against {base.arm})" * (base.arm != group_of[r.arm])
            lines[f"{path.removeprefix('model.')}: {' → '.join(texts)}{control}"] += 1
    return {
        arm: [line + f" (in {k} of {count[arm]} runs)" * (k < count[arm]) for line, k in lines.items()] or ["nothing"]
        for arm, lines in found.items()
    }


def with_baselines(comparison: Comparison, records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return a list of pairs (run, run of its baseline) with the same condition (number of labelled images, training length,
    tuned or not) and the same seed. Each item is a record (the results of a run). Runs without such a partner are left out.

    Runs of the baselines themselves are left out, too.
    """
    baseline_of = {row.arm: row.baseline for row in comparison.rows}
    found = {(r.arm, condition_of(r), r.seed): r for r in records if r.run}
    techniques = {key: r for key, r in found.items() if r.role != "baseline"}
    pairs = [(r, found.get((baseline_of.get(arm, ""), c, seed))) for (arm, c, seed), r in techniques.items()]
    return [(r, base) for r, base in pairs if base]


def changed_options(base: dict, run: dict) -> dict[str, tuple[Any, Any]]:
    """Return the options in which two runs differ, as a dict from the name of an option to the tuple (value in `base`, value in
    `run`). Both arguments are dicts with all settings of a run.

    All differences inside an earlier run (`init` or `teacher`) count as one.
    """
    found = differences(base, run)
    for name in ("init", "teacher"):
        if len(inside := [path for path in found if path.startswith(f"{name}.")]) > 1:
            found = {path: values for path, values in found.items() if path not in inside} | {name: (base[name], run[name])}
    return found


def hyperparameters(comparison: Comparison, records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return the values of the hyperparameters that were varied, as a nested dict: `result[name][arm]` is the value in an arm
    (variant). Only arms that differ from the baseline in one numeric option are used. `records` are the results of the runs.

    The baseline comes first. Options with fewer than three values are left out.

    The comparison must have one baseline. Where the records have the number of tokens and it differs, `tokens` is a further
    hyperparameter.
    """
    (baseline,) = comparison.baselines
    records = at_common_settings(records)
    found: dict[str, dict[str, float]] = {}
    for r, base in with_baselines(comparison, records):
        changed = changed_options(base.run, r.run)
        numbers = {path: values for path, values in changed.items() if all(type(value) in (int, float) for value in values)}
        path = next(iter(numbers), "")
        if len(changed) != 1 or not numbers or path.startswith(("init", "teacher")):
            continue
        if comparison.arms.get(r.arm) != "technique" or base.arm != baseline:  # an arm with another control is no such arm
            continue
        pairs = {path: numbers[path]}
        if base.tokens and r.tokens and base.tokens != r.tokens:
            pairs["tokens"] = base.tokens, r.tokens
        for option, (before, after) in pairs.items():
            found.setdefault(option, {baseline: before})[r.arm] = after
    found = {path: values for path, values in found.items() if len(set(values.values())) >= MIN_VALUES}
    names = option_names(found)
    return {names[path]: values for path, values in found.items()}


class Trial(NamedTuple):
    """One trial of the tuning of an arm (variant in the comparison), as a point of a plot over one tuned option. It holds the
    value of this option, the mean validation accuracy, the number of seeds, and whether its settings were chosen.

    value     value of the option
    accuracy  mean accuracy on the validation images
    seeds     number of seeds; trials that were stopped early have fewer
    chosen    whether these are the settings that were chosen
    """

    value: float
    accuracy: float
    seeds: int
    chosen: bool


def tuning_of(comparison: Comparison, records: Sequence[Record]) -> dict[tuple[int | None, str], dict]:
    """Return how each arm (variant) was tuned, as a dict from the pair (number of labelled images, arm) to a dict with the
    chosen settings, the number of trials, their cost and their scores. `records` are the results of the runs, and `comparison`
    holds the arms to use.

    The arms are those of the comparison, under its main conditions.
    """
    main = comparison.main
    shown = [r for r in records if r.tuning and r.arm in comparison.arms and condition_of(r) in main]
    return {(r.labels, r.arm): r.tuning for r in shown if r.tuning}


def tuning_curves(comparison: Comparison, records: Sequence[Record]) -> dict[tuple[int | None, str], dict[str, list[Trial]]]:
    """Return the trials of the tuning for a figure, as a nested dict: `result[labels, option][arm]` is the list of the trials
    of an arm (variant) with `labels` labelled images. It is sorted by the value of `option`, the name of a tuned
    hyperparameter. `records` are the results of the runs, and `comparison` holds the arms to use.

    Options that are no numbers, and options with a single value, are left out.
    """
    found: dict[tuple[int | None, str], dict[str, list[Trial]]] = {}
    for (labels, arm), tuning in tuning_of(comparison, records).items():
        for option, chosen in tuning["settings"].items():
            trials = [
                Trial(settings[option], accuracy, seeds, settings == tuning["settings"])
                for settings, accuracy, seeds in tuning.get("curve") or ()
                if type(settings.get(option)) in (int, float) and accuracy is not None
            ]
            if type(chosen) in (int, float) and len({trial.value for trial in trials}) > 1:
                found.setdefault((labels, option), {})[arm] = sorted(trials)
    return found


def options_at_edge(tuning: dict) -> list[str]:
    """Return the names of the tuned options whose best value lies at the edge of its range, or is the smallest or the largest
    of at least three numbers that were tried. `tuning` is how the settings of an arm (variant) were chosen (`Record.tuning`).

    Older records name only the options at the edge of their range. So the values that were tried are looked at here too, unless
    a trial is missing in the record because its loss became infinite: a value beyond the best one may have been tried in it.
    """
    scored = [settings for settings, _, _ in tuning.get("curve") or ()]
    known = scored if len(scored) >= tuning.get("trials", 0) else []
    at_edge = tuning.get("edge") or ()
    return [
        option
        for option, chosen in tuning["settings"].items()
        if option in at_edge or is_extreme(chosen, [settings.get(option) for settings in known])
    ]


def initial_weights(records: Sequence[Record]) -> dict[str, str]:
    """Return a dict from the name of an arm (variant) to the origin of its initial weights as text, such as `weights of A`. The
    origin is another arm or a file of pretrained weights. `records` are the results of the runs.

    Arms without such an origin are left out.
    """
    arms = {r.fingerprint: r.arm for r in records}
    found: dict[str, str] = {}
    for r in records:
        init, earlier = r.run.get("init") or {}, (r.pretraining or {}).get("fingerprint")
        if "make" in init:
            found[r.arm] = init["name"]
        elif init and earlier in arms:
            found[r.arm] = arms[earlier]
    return {arm: f"weights of {name}" for arm, name in found.items()}
