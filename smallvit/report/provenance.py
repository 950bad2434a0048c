"""Where the numbers of a report come from: what ran them, how they were tuned, and what makes them less comparable."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from smallvit.components import describe_value
from smallvit.record import Record, short_name
from smallvit.words import how_many, join_names

from .alarms import (
    at_the_edge,
    baseline_of_arms,
    below_raw_pixels,
    no_better_than_guessing,
    no_better_than_random,
    one_token,
    scored_settings,
    trials_of,
    undertrained,
    unequal_trials,
    unused_seeds,
)
from .format import at_labels
from .settings import initial_weights

MACHINE = ("device", "precision", "threads", "processes", "kernel", "compiled")  # fields of a record


def warnings(records: Sequence[Record], trials: Mapping[str, int] | None = None) -> list[str]:
    """Return a list of warnings about a comparison, one sentence each. For example, runs used different machines, or an arm
    (variant) was probably trained too briefly. `records` are the results of the runs. `trials` is a dict from the name of an
    arm to the number of its settings that were tried on validation images.
    """
    facts: dict[str, dict[str, dict[str, dict]]] = {}
    labels_of: dict[str, dict] = {}
    processors = {r.cpu for r in records}
    for r in records:
        labels_of.setdefault(r.arm, {})[r.labels] = None
        conditions = {"cpu": short_name(r.cpu, processors)} | {name: getattr(r, name) for name in MACHINE}
        conditions["code"] = (r.code or {}).get("sha256")
        if data := r.run.get("data"):
            conditions[f"content of {describe_value(data)}"] = r.data_sha256
        conditions |= {f"{name} version": version for name, version in (r.versions or {}).items()}
        for name, value in conditions.items():
            if value is not None:
                facts.setdefault(name, {}).setdefault(str(value), {}).setdefault(r.arm, {})[r.labels] = None

    def named(arms: dict[str, dict]) -> str:
        """The names of arms, with the numbers of labels where an arm has a value at some of its numbers only."""
        texts = (f"{a} {at_labels([*some])}" if len(some) < len(labels_of[a]) else a for a, some in arms.items())
        return join_names(list(texts))

    out = [
        f"Runs differ in {name}: " + "; ".join(f"{value} in {named(arms)}" for value, arms in values.items())
        for name, values in facts.items()
        if len(values) > 1
    ]
    group = baseline_of_arms(records)
    judged = list(dict.fromkeys((group[r.arm], r.score) for r in records if r.score and r.role in ("baseline", "technique")))
    scores = list(dict.fromkeys(score for own, score in judged if sum(own == other for other, _ in judged) > 1))
    uncommitted = sum(bool((r.code or {}).get("dirty")) for r in records)
    reads = sum((r.test_reads or 0) > 1 for r in records)
    external = list(dict.fromkeys(r.arm for r in records if "make" in (r.run.get("init") or {})))
    repeats = max((r.test_repeats or 0 for r in records), default=0)
    out += [f"Test images that are also training or validation images, pixel by pixel: {repeats:,}"] if repeats else []
    out += [f"Costs exclude the training of external weights, used by {join_names(external)}"] if external else []
    out += [f"Baseline and techniques are judged by different numbers: {', '.join(scores)}"] if len(scores) > 1 else []
    out += [f"Runs of code with uncommitted changes, which the commit does not identify: {uncommitted}"] if uncommitted else []
    out += [f"Runs that read the test images more than once: {reads}"] if reads else []
    out += undertrained(records) + below_raw_pixels(records) + at_the_edge(records) + unequal_trials(records, trials)
    out += unused_seeds(records)
    return out + one_token(records) + no_better_than_guessing(records) + no_better_than_random(records)


def provenance(records: Sequence[Record], options: str, trials: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return where the results come from, as a dict from a heading, such as "Machine", to a text. `records` are the results of
    the runs, and `options` are their command-line options as text. `trials` is a dict from the name of an arm (variant) to the
    number of its settings that were tried on validation images.

    The dict also names pretrained weights, trials on validation images and the commands that repeat the runs.
    """
    sources, recipe = initial_weights(records), f"{records[0].recipe}.py{options} (or its path)"

    def each(values: Iterable[str]) -> str:
        return "; ".join(f"{value} ({how_many(k, 'run')})" for value, k in Counter(values).items())

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
        lists = {name: [str(item) for item in value] for name, value in shown.items() if isinstance(value, list)}
        shown |= {name: join_names(items) or "none" for name, items in lists.items()}
        texts = [f"{name} {value}" for name, value in shown.items()]
        return ", ".join([sources.get(r.arm) or describe_value(r.run.get("init")), *texts])

    unlabelled: dict[str, int] = {}
    for r in records:
        count = max(r.unlabelled or 0, (r.pretraining or {}).get("unlabelled") or 0)
        unlabelled[r.arm] = max(unlabelled.get(r.arm, 0), count)
    tried = by_number(trials_of(records, trials))
    scored = by_number({arm: count for arm, count in scored_settings(records).items() if count > 1})
    return {
        "Records": each(r.status for r in records),
        "Code": each(map(code, records)),
        "Versions": each(", ".join(f"{name} {version}" for name, version in (r.versions or {}).items()) for r in records),
        "Machine": each(map(machine, records)),
        "Chosen on validation images": each(chosen(r.chosen_on_val) for r in records if r.chosen_on_val) or "nothing",
        **({"Settings tried on validation images": tried} if tried else {}),
        **({"Settings scored on the test images": scored} if scored else {}),
        "Images used without labels": "; ".join(f"{arm}: {count:,}" for arm, count in unlabelled.items() if count) or "none",
        "Pretrained weights": each(loaded(r) for r in records if r.init_weights) or "none",
        "Run again": f"smallvit run {recipe}",
        "Write this page again": f"smallvit report {recipe}",
    }


def by_number(counts: Mapping[str, int]) -> str:
    """Return numbers of arms (variants) as text, with equal numbers together: `8 of A, B and C; 3 of D`. `counts` is a dict
    from the name of an arm to its number.
    """
    arms: dict[int, list[str]] = {}
    for arm, count in counts.items():
        arms.setdefault(count, []).append(arm)
    return "; ".join(f"{count} of {join_names(names, len(names))}" for count, names in arms.items())
