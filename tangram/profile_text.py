"""A profile in a terminal: tables and a heat map in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tangram.advice import Grouping, Margin, advised_margin, groupings, knee, margins, needs_of, shape_of
from tangram.calibration.statistics import LEAST_LEFT_OUT, between_samples, split_half
from tangram.config import TangramConfig
from tangram.drift import KeyReference
from tangram.predict import predict
from tangram.profile import Profile
from tangram.profile_file import Calibration
from tangram.profile_summary import compare

BLOCKS = " ▁▂▃▄▅▆▇█"
LENGTHS = (4096, 32768, 131072)
Table = Sequence[Sequence[float]]


def show(path: str, profile: Profile, config: TangramConfig) -> list[str]:
    """All that is known of a profile, and what ``config`` would make of it."""
    profile = profile.at(config.retention)
    budgets = profile.budgets(config.retention, config.alpha)
    lines = [*_about(path, profile), "", *_heat_map(budgets), "", *_layers(profile, budgets)]
    known = profile.calibration
    if known is None:
        return [*lines, "", "The profile names no model and no samples: no memory, no coverage."]
    sizes = groupings(config, shape_of(known.model), profile)
    return [
        *lines,
        "",
        *_memory(profile, known, config),
        "",
        *_groups(sizes),
        "",
        *_margins(margins(profile, known), known.samples),
        "",
        *_advice(profile, known, sizes),
    ]


def _about(path: str, profile: Profile) -> list[str]:
    layers, heads = len(profile.mean), len(profile.mean[0])
    known = profile.calibration
    if known is None:
        return [f"{path}: {layers} layers x {heads} KV heads, written by hand"]
    model, made = known.model, known.settings
    lines = [
        f"{path}",
        f"model    {model.name} ({model.architecture}), {model.dtype}",
        f"heads    {layers} layers x {heads} KV heads of {model.head_size}",
        f"made     {known.created} by tangram {known.tool}, computed in {made['dtype']}",
        f"from     {known.samples} samples of {made['length']} tokens, hash {known.samples_hash[:12]}",
        f"data     {made['data']}, seed {made['seed']}",
        f"oracle   {made['oracle']}, scope {made['scope']}, retention {made['retention']:g}{_also(known)}",
        f"drift    {_watched(known)}",
        *_asked(known),
    ]
    needs = needs_of(known)
    halves, pairs = split_half(needs), between_samples(needs)
    if halves is not None and pairs is not None:
        lines += [
            f"alike    two halves of the samples rank the heads alike by {halves:.3f} (Spearman),",
            f"         two samples by {pairs[0]:.3f} on average, {pairs[1]:.3f} at least",
        ]
    return lines


def _also(known: Calibration) -> str:
    others = ", ".join(f"{other.retention:g}" for other in known.others)
    return f" (the file has {others} too)" if others else ""


def _watched(known: Calibration) -> str:
    keys = known.key_needs
    if keys is None:
        return "an engine can compare live text with the first that it serves only: needs by keys are missing"
    spread = KeyReference.of(np.array(keys.needs)).spread
    return f"samples differ by {spread:.3f} from the others' mean needs by {keys.scorer}"


def _asked(known: Calibration) -> list[str]:
    if known.mean_queries is None:
        return ["queries  none: the scorer auto is keyvalue until `tangram profile add-queries` adds them"]
    lines = ["queries  their means are known: the scorer auto is keyvalue_query"]
    origin = known.queries_from
    if origin is None:
        return lines
    read = f"{origin.samples} samples of {origin.length} tokens, {origin.data}, seed {origin.seed}"
    if origin.samples_hash == known.samples_hash:
        read = "the same samples"
    return [
        *lines,
        f"         added {origin.created} by tangram {origin.tool}, computed in {origin.dtype}, from",
        f"         {read}",
    ]


def _heat_map(budgets: Table) -> list[str]:
    """A line for each KV head, a block for each layer."""
    lines = ["Budgets, layers from left to right, from nothing ( ) to all of it (█):"]
    for head in range(len(budgets[0])):
        blocks = "".join(_block(row[head]) for row in budgets)
        lines.append(f"  head {head:>3} |{blocks}|")
    return lines


def _block(share: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, round(share * (len(BLOCKS) - 1)))]


def _layers(profile: Profile, budgets: Table) -> list[str]:
    """A line for each layer, means over its heads."""
    known = profile.calibration
    lines = ["layer   need    std  least   most  budget  budgets of the heads"]
    for layer, (mean, std, row) in enumerate(zip(profile.mean, profile.std, budgets, strict=True)):
        least, most = (min(mean), max(mean))
        if known is not None:
            least, most = min(known.least[layer]), max(known.most[layer])
        heads = " ".join(f"{share:.2f}" for share in row)
        means = f"{_mean(mean):.3f}  {_mean(std):.3f}  {least:.3f}  {most:.3f}"
        lines.append(f"{layer:>5}  {means}  {_mean(row):>6.3f}  {heads}")
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _memory(profile: Profile, known: Calibration, config: TangramConfig) -> list[str]:
    found = predict(config, shape_of(known.model), profile, LENGTHS)
    group = found.geometry.group_size
    setting = f"retention {config.retention:g}, alpha {config.alpha:g}, scope {config.scope}"
    lines = [f"A conversation at {setting}, groups of {group}:", " tokens     memory  full cache   share"]
    for at in found.at:
        beyond = "" if at.tokens <= known.model.max_model_len else "  (longer than the model)"
        share = at.bytes / at.full_bytes
        lines.append(
            f"{at.tokens:>7} {_size(at.bytes):>10}  {_size(at.full_bytes):>10}  {share:>6.1%}{beyond}"
        )
    return [*lines, *(f"Note: {warning}" for warning in found.warnings)]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _groups(sizes: list[Grouping]) -> list[str]:
    lines = [
        "Fragmentation: tokens kept above the heads' own budgets, and padding",
        " group  tiers  page KiB  row width  above  padding",
    ]
    return lines + [
        f"{g.group_size:>6}  {g.tiers:>5}  {g.page_bytes / 1024:>8.1f}  {g.row_width:>9}  {g.excess:>5.1%}  "
        f"{g.padding:>7.1%}"
        for g in sizes
    ]


def _margins(found: list[Margin], samples: int) -> list[str]:
    lines = ["Coverage: share of the samples' needs that mean + alpha x std covers", " alpha  covered   cost"]
    if samples < LEAST_LEFT_OUT:
        lines.insert(1, f"(of {samples} samples: each is judged by itself too, which flatters)")
    return lines + [f"{m.alpha:>6.2f}  {m.covered:>7.1%}  {m.cost:>5.3f}" for m in found]


def _advice(profile: Profile, known: Calibration, sizes: list[Grouping]) -> list[str]:
    margin, group = advised_margin(profile, known), knee(sizes)
    first = "no alpha up to 5 covers 95% of the needs: calibrate on more samples."
    if margin is not None:
        first = f"alpha {margin.alpha:g} covers {margin.covered:.1%} of the needs at least cost"
        first += f" ({margin.cost:.3f} of the cache before scaling)."
    second = f"groups of {group.group_size} lie at the knee of waste ({group.waste:.1%})"
    return [f"Advice: {first}", f"Advice: {second} against row width ({group.row_width})."]


def diff(first: str, second: str, config: TangramConfig) -> list[str]:
    """How two profiles of heads in the same arrangement differ.

    Args:
        first, second: their files.

    Raises:
        ProfileError: one cannot be used, or they are of models of different shapes.
    """
    found = compare(first, second, config.retention, config.alpha)
    made = found["made_differently"].items()
    mean, largest = found["mean_difference"], found["largest_difference"]
    setting = f"retention {config.retention:g}, alpha {config.alpha:g}"
    return [
        f"A  {first}",
        f"B  {second}",
        *(f"{name}: {ours} in A, {theirs} in B" for name, (ours, theirs) in made),
        f"Needs agree in rank by {found['rank_correlation']:.3f} (Spearman).",
        f"Budgets at {setting} differ by {mean:.3f} on average, {largest:.3f} at most.",
        "layer  head      A      B",
        *(
            f"{one['layer']:>5}  {one['head']:>4}  {one['first']:.3f}  {one['second']:.3f}"
            for one in found["heads"]
        ),
    ]
