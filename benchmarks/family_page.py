"""Write the page of supported architectures, and the list that runs read, from the results of `benchmarks.families`.

    python -m benchmarks.family_page results.jsonl [--page FILE] [--verified FILE]

Without other files, it writes docs/reference/families.md and rlpack/models/verified.json.
"""

import argparse
import json
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from benchmarks.families import MODES, PRECISIONS, ROLES, Result

VERIFIED = Path(__file__).parents[1] / "rlpack" / "models" / "verified.json"
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
_MARKS = {"right": "yes", "refused": "refused", "wrong": "WRONG", "crashed": "CRASHED", "none": "–"}

_INTRODUCTION = """# Supported architectures

<!-- Written by `python -m benchmarks.family_page`; don't edit. -->

Every architecture that transformers {transformers} can build as a causal language model, as a tiny random model on the
CPU with PyTorch {torch}. *yes*: outputs and all gradients equal those of each row alone under transformers' own
attention, in fp32 and, within the rounding that transformers' own bf16 has, in bf16. *refused*: the run ends with an
error that names the model and the reason, given below. *yes (fp32)*: refused in bf16. –: transformers has no such
model. Padded is both `batching.mode=dynamic` and `fixed`.

The same checks run at the start of every rank (`actor.isolation_check`), on the real weights. With another version of
transformers, they also run before any process starts, on a model with random weights, if it is small.
"""


def render(results: list[Result]) -> str:
    """Return the page."""
    by_type: dict[str, dict[str, Result]] = {}
    for result in results:
        by_type.setdefault(result.model_type, {})[result.setting] = result
    built = {name: settings for name, settings in by_type.items() if "build" not in settings}
    lines = [_INTRODUCTION.format(transformers=version("transformers"), torch=version("torch").partition("+")[0])]
    lines.append(_summary(built))
    layouts = [f"{role}, {layout}" for role in ROLES for layout in ("packed", "padded")]
    lines += [f"| model_type | {' | '.join(layouts)} | generates with |", "|---" * (len(layouts) + 2) + "|"]
    for name, settings in sorted(built.items()):
        cells = [_cell(settings, role, layout) for role in ROLES for layout in ("packed", "padded")]
        lines.append(f"| {name} | {' | '.join(cells)} | {_generation(settings['generate'])} |")
    lines += ["", "## Reasons", ""]
    for name, settings in sorted(built.items()):
        reasons = _reasons(settings)
        if reasons:
            lines += [f"**{name}**", "", *(f"- {reason}" for reason in reasons), ""]
    lines += ["## Not tried", ""]
    lines += [
        f"- {name}: {settings['build'].detail}" for name, settings in sorted(by_type.items()) if "build" in settings
    ]
    return "\n".join(lines) + "\n"


def verified(results: list[Result]) -> dict[str, list[str]]:
    """Return the architectures whose policies and critics are right in all settings of a layout, by layout."""
    by_layout: dict[str, dict[str, set[str]]] = {"packed": {}, "padded": {}}
    for result in results:
        mode, _, role = result.setting.partition(" ")
        if role.startswith(("policy", "critic")):
            layout = by_layout["packed" if mode == "packed" else "padded"]
            layout.setdefault(result.model_type, set()).add(result.verdict)
    return {
        layout: sorted(name for name, verdicts in types.items() if verdicts == {"right"})
        for layout, types in by_layout.items()
    }


def _summary(built: dict[str, dict[str, Result]]) -> str:
    """Return the numbers of architectures by verdict."""
    counts = Counter(
        layout
        for settings in built.values()
        for layout in ("packed", "padded")
        if _cell(settings, "policy", layout).startswith("yes")
    )
    trained = sum(
        any(_cell(settings, "policy", layout).startswith("yes") for layout in ("packed", "padded"))
        for settings in built.values()
    )
    verdicts = Counter(result.verdict for settings in built.values() for result in settings.values())
    return (
        f"Of {len(built)} architectures {trained} can be trained: {counts['packed']} packed, {counts['padded']} "
        "padded. "
        f"Of all settings {verdicts['right']} are right, {verdicts['refused']} refused, {verdicts['wrong']} wrong and "
        f"{verdicts['crashed']} crashed.\n"
    )


def _cell(settings: dict[str, Result], role: str, layout: str) -> str:
    """Return the verdict on a role in a layout, over modes and precisions."""
    modes = ("packed",) if layout == "packed" else tuple(mode for mode in MODES if mode != "packed")
    verdicts = {
        p: [settings[f"{m} {role} {p}"].verdict for m in modes if f"{m} {role} {p}" in settings] for p in PRECISIONS
    }
    found = {verdict for part in verdicts.values() for verdict in part}
    for bad in ("crashed", "wrong"):
        if bad in found:
            return _MARKS[bad]
    if not found:
        return _MARKS["none"]
    if found == {"refused", "right"}:
        right = [precision for precision, part in verdicts.items() if set(part) == {"right"}]
        return f"yes ({', '.join(right)})" if right else "refused"
    return _MARKS[found.pop()]


def _generation(result: Result) -> str:
    """Return the decoder that generates."""
    ways = {
        "DirectDecoder": "cache",
        "PreparedMaskDecoder": "cache",
        "PaddedDecoder": "cache",
        "EqualLengthDecoder": "cache, prompts of one length together",
        "RecomputingDecoder": "whole rows, no cache",
    }
    return ways[result.detail.partition(",")[0]] if result.verdict == "right" else _MARKS[result.verdict]


def _reasons(settings: dict[str, Result]) -> list[str]:
    """Return the errors of refused settings; of several with one text the first."""
    reasons: dict[str, str] = {}
    for setting, result in settings.items():
        if result.verdict == "refused":
            text = re.split(r"; (?:set|use|\w+\.isolation_check)\b", result.detail)[0]
            text = re.sub(r"\('/\S*'\) ", "", text)
            layout, _, role = setting.replace("dynamic", "padded").replace("fixed", "padded").partition(" ")
            # Errors differ in their numbers, and in the names of role and class.
            reason = re.sub(r"^\w+(?: can't be run \w+ as the \w+)?: |\d\S*", "", text)
            reasons.setdefault(f"{layout} {reason}", f"{layout} {role}: {text}".replace(" :", ":"))
    return [reason.replace("|", "\\|").replace("<", "&lt;") for reason in reasons.values()]


def main() -> None:
    """Write the page and the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, help="JSON lines of benchmarks.families; later lines replace earlier ones"
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--verified", type=Path, default=VERIFIED, help="what `rlpack.models.verified` reads")
    options = parser.parse_args()
    results = [Result(**json.loads(line)) for line in options.results.read_text().splitlines()]
    options.page.write_text(render(results))
    versions = {name: version(name).partition("+")[0] for name in ("transformers", "torch")}
    options.verified.write_text(json.dumps(versions | verified(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
