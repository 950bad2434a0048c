"""Where the numbers of a report come from: what differs between arms, what ran them, and what makes them less comparable."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from smallvit.components import describe_value, differences
from smallvit.record import RANDOM, Record, format_labels

from .compare import Comparison
from .format import join_names
from .statistics import MIN_PAIRS, TIE, spread

MACHINE = ("device", "precision", "threads", "kernel", "compiled")  # fields of a record
MIN_VALUES = 3  # values of a hyperparameter that are worth a figure; two are shown better as a paired difference
NAMES = {"dim": "width", "lr": "learning rate", "mlp_ratio": "MLP ratio"}


def warnings(records: Sequence[Record]) -> list[str]:
    """Return a list of warnings about a comparison, one sentence each. For example, runs used different machines, or an
    accuracy could be reached by guessing. `records` are the results of the runs.
    """
    facts: dict[str, dict[str, dict]] = {}
    for r in records:
        conditions = {name: getattr(r, name) for name in ("cpu", *MACHINE)} | {"code": (r.code or {}).get("sha256")}
        if data := r.run.get("data"):
            conditions[f"content of {describe_value(data)}"] = r.data_sha256
        conditions |= {f"{name} version": version for name, version in (r.versions or {}).items()}
        for name, value in conditions.items():
            if value is not None:
                facts.setdefault(name, {}).setdefault(str(value), {})[r.arm] = None
    out = [
        f"Runs differ in {name}: " + "; ".join(f"{value} in {join_names(list(arms))}" for value, arms in values.items())
        for name, values in facts.items()
        if len(values) > 1
    ]
    scores = list(dict.fromkeys(r.score for r in records if r.score and r.role != "reference"))
    uncommitted = sum(bool((r.code or {}).get("dirty")) for r in records)
    reads = sum((r.test_reads or 0) > 1 for r in records)
    external = list(dict.fromkeys(r.arm for r in records if "make" in (r.run.get("init") or {})))
    repeats = max((r.test_repeats or 0 for r in records), default=0)
    out += [f"Test images that are also training or validation images, pixel by pixel: {repeats:,}"] if repeats else []
    out += [f"Costs exclude the training of external weights, used by {join_names(external)}"] if external else []
    out += [f"Baseline and techniques are judged by different numbers: {', '.join(scores)}"] if len(scores) > 1 else []
    out += [f"Runs of code with uncommitted changes, which the commit does not identify: {uncommitted}"] if uncommitted else []
    out += [f"Runs that read the test images more than once: {reads}"] if reads else []
    return out + one_token(records) + no_better_than_guessing(records) + no_better_than_random(records)


def one_token(records: Sequence[Record]) -> list[str]:
    """Return a warning if the images of some arms (variants in the comparison) become a single token, because attention between
    patches is then impossible. `records` are the results of the runs.
    """
    arms = list(dict.fromkeys(r.arm for r in records if r.tokens == 1))
    return [f"The image is a single token, so attention has nothing to compare, in: {join_names(arms)}"] if arms else []


def no_better_than_guessing(records: Sequence[Record]) -> list[str]:
    """Return a list of warnings, one for each arm (variant) that may be no better than guessing. The comparison is with a model
    that always predicts the most frequent class. `records` are the results of the runs.
    """
    cells: dict[tuple, list[Record]] = {}
    for r in records:
        if r.finished and r.test_majority and r.role != "reference" and r.score == "accuracy":
            cells.setdefault((r.arm, r.labels), []).append(r)
    out = []
    for (arm, labels), runs in cells.items():
        mean, _, low, _ = spread([r.result for r in runs])
        share = runs[0].test_majority or 0.0
        bound = mean if len(runs) < MIN_PAIRS else low
        if mean is not None and bound is not None and bound <= share + TIE:
            out.append(
                f"{arm} at {format_labels(labels)}: accuracy {100 * mean:.2f}%, not shown to be better than always naming the "
                f"most frequent class ({100 * share:.2f}%). Check the learning rate and the number of steps"
            )
    return out


def no_better_than_random(records: Sequence[Record]) -> list[str]:
    """Return a list of warnings, one for each arm (variant) and each probe (a classifier on frozen features) that is not shown
    to be better than the same probe of an untrained model. `records` are the results of the runs.

    Runs with the same seed are compared.
    """
    finished = {(r.arm, r.labels, r.seed): r for r in records if r.finished}
    cells = dict.fromkeys((r.arm, r.labels) for r in finished.values() if r.role != "reference")
    probes = dict.fromkeys(name for r in finished.values() for name in r.probes or ())
    out = []
    for arm, labels in cells:
        pairs = [
            (r.test or {}, finished[RANDOM, labels, seed].test or {})
            for (name, n, seed), r in finished.items()
            if (name, n) == (arm, labels) and (RANDOM, n, seed) in finished
        ]
        for probe in probes:
            gains = [trained[probe] - random[probe] for trained, random in pairs if probe in trained and probe in random]
            mean, _, low, _ = spread(gains)
            if mean is not None and (mean if low is None else low) <= 0:
                bound = "" if low is None else f" (95% interval from {100 * low:+.2f})"
                gain = f"{100 * mean:+.2f} points{bound}".replace("-", "−")
                out.append(f"{arm} at {format_labels(labels)}, {probe}: not shown to be better than an untrained model, {gain}")
    return out


def changes(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[str]]:
    """Return a dict from the name of each arm (variant) to a list of the settings in which it differs from its baseline, such
    as `tokenizer: PatchEmbed → ConvStem`. `records` are the results of the runs.

    The runs that are compared have the same number of labelled images and the same seed.
    """
    sources = initial_weights(records)
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
            lines[f"{path.removeprefix('model.')}: {' → '.join(texts)}"] += 1
    return {
        arm: [line + f" (in {k} of {count[arm]} runs)" * (k < count[arm]) for line, k in lines.items()] or ["nothing"]
        for arm, lines in found.items()
    }


def with_baselines(comparison: Comparison, records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return a list of pairs (run, run of its baseline) with the same number of labelled images and the same seed. Each item is
    a record (the results of a run). Runs without such a partner are left out.

    Runs of the baselines themselves are left out, too.
    """
    baseline_of = {row.arm: row.baseline for row in comparison.rows}
    found = {(r.arm, r.labels, r.seed): r for r in records if r.run}
    pairs = [(r, found.get((baseline_of.get(r.arm, ""), r.labels, r.seed))) for r in found.values() if r.role != "baseline"]
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
    found: dict[str, dict[str, float]] = {}
    for r, base in with_baselines(comparison, records):
        changed = changed_options(base.run, r.run)
        numbers = {path: values for path, values in changed.items() if all(type(value) in (int, float) for value in values)}
        path = next(iter(numbers), "")
        if len(changed) != 1 or not numbers or path.startswith(("init", "teacher")):
            continue
        if comparison.arms.get(r.arm) != "technique":
            continue
        last = path.rpartition(".")[2]
        pairs = {NAMES.get(last, last.replace("_", " ")): numbers[path]}
        if base.tokens and r.tokens and base.tokens != r.tokens:
            pairs["tokens"] = base.tokens, r.tokens
        for name, (before, after) in pairs.items():
            found.setdefault(name, {baseline: before})[r.arm] = after
    return {name: values for name, values in found.items() if len(set(values.values())) >= MIN_VALUES}


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


def provenance(records: Sequence[Record], options: str) -> dict[str, str]:
    """Return where the results come from, as a dict from a heading to a text. Headings are, for example, code, versions and
    machine. `records` are the results of the runs, and `options` are their command-line options as text.

    The dict also names pretrained weights and the commands that repeat the runs.
    """
    sources, recipe = initial_weights(records), f"{records[0].recipe}.py{options} (or its path)"

    def each(values: Iterable[str]) -> str:
        return "; ".join(f"{value} ({k} run{'s' * (k > 1)})" for value, k in Counter(values).items())

    def code(r: Record) -> str:
        k = r.code or {}
        state = {True: "with uncommitted changes", False: "clean", None: "state unknown"}[k.get("dirty")]
        return f"{k.get('sha256')}, commit {k.get('commit') or 'unknown'}, {state}"

    def machine(r: Record) -> str:
        values = {name: getattr(r, name) for name in ("cpu", *MACHINE)}
        return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, False, "rule"))

    def chosen(choice: dict) -> str:
        others = [f"{name} {value}" for name, value in choice.items() if name != "what"]
        return ", ".join(filter(None, (choice.get("what"), *others)))

    def loaded(r: Record) -> str:
        weights = r.init_weights or {}
        shown = {name: value for name, value in weights.items() if name != "sha256" or "name" in weights}
        texts = [f"{name} {join_names(value) or 'none' if isinstance(value, list) else value}" for name, value in shown.items()]
        return ", ".join([sources.get(r.arm) or describe_value(r.run.get("init")), *texts])

    unlabelled: dict[str, int] = {}
    for r in records:
        count = max(r.unlabelled or 0, (r.pretraining or {}).get("unlabelled") or 0)
        unlabelled[r.arm] = max(unlabelled.get(r.arm, 0), count)
    return {
        "Records": each(r.status for r in records),
        "Code": each(map(code, records)),
        "Versions": each(", ".join(f"{name} {version}" for name, version in (r.versions or {}).items()) for r in records),
        "Machine": each(map(machine, records)),
        "Chosen on validation images": each(chosen(r.chosen_on_val) for r in records if r.chosen_on_val) or "nothing",
        "Images used without labels": "; ".join(f"{arm}: {count:,}" for arm, count in unlabelled.items() if count) or "none",
        "Pretrained weights": each(loaded(r) for r in records if r.init_weights) or "none",
        "Run again": f"smallvit run {recipe}",
        "Write this page again": f"smallvit report {recipe}",
    }
