"""An audit in words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kda_lib.lab.audit.check import Audit, Kind, Unknown, Violation

_ABOUT_MODULE = (Kind.MODULE_TARGET, Kind.MODULE_VERSION)


def render(audit: Audit, show: int) -> str:
    """The audit as lines of text, with at most ``show`` places of each form."""
    return "\n".join(_lines(audit, show))


def _lines(audit: Audit, show: int) -> Iterator[str]:
    yield f"{audit.source} (.target {audit.module_target}, .version {audit.version}) for {audit.target}"
    yield f"{audit.places} places of {audit.forms} forms, by {audit.assembler} (table of {audit.made})"
    if audit.probed:
        yield f"asked on the spot, since the table lacks them: {', '.join(audit.probed)}"
    for violation in audit.violations:
        if violation.kind in _ABOUT_MODULE:
            yield f"{violation.text}: {_module_fault(violation, audit.targets)}"
    others = sorted((v for v in audit.violations if v.kind not in _ABOUT_MODULE), key=lambda v: (v.form, v.kind))
    for (form, _), group in groupby(others, key=lambda v: (v.form, v.kind)):
        violations = list(group)
        yield f"{form}: {_fault(violations[0], audit)}"
        yield from _places(violations, show)
    for form, unknown in groupby(sorted(audit.unknown, key=lambda u: u.form), key=lambda u: u.form):
        places = list(unknown)
        yield f"{form}: unknown: {places[0].reason}"
        yield from _places(places, show)
    yield _verdict(audit)


def _module_fault(violation: Violation, known: tuple[str, ...]) -> str:
    if violation.kind is Kind.MODULE_TARGET:
        where = _in_words(violation.targets, known) or "no target of this assembler"
        return f"runs on {where}; {violation.replacement}"
    if violation.needs_version:
        return f"needs at least .version {violation.needs_version}"
    return violation.replacement


def _fault(violation: Violation, audit: Audit) -> str:
    if violation.kind is Kind.VERSION:
        return f"needs .version {violation.needs_version}, the text has {audit.version}"
    if violation.kind is Kind.OWN_TARGET:
        fault = f"{audit.target} has it, but .target {audit.module_target} lacks it"
    else:
        fault = f"needs {_in_words(violation.targets, audit.targets)}"
    return f"{fault}{f'; instead: {violation.replacement}' if violation.replacement else ''}"


def _in_words(some: tuple[str, ...], known: tuple[str, ...]) -> str:
    """Targets from the lowest to the highest, in short where they are all from the first one on."""
    later = known[known.index(some[0]) :] if some and some[0] in known else ()
    if len(some) > 1 and some == later:
        return f"{some[0]} or any later target"
    return " or ".join(some)


def _places(places: list[Violation] | list[Unknown], show: int) -> Iterator[str]:
    for place in places[:show]:
        yield f"  line {place.line}: {place.text}"
    if len(places) > show:
        yield f"  and {len(places) - show} more (--json lists them all)"


def _verdict(audit: Audit) -> str:
    if audit.clean:
        return f"clean: nothing in it that {audit.target} lacks"
    if audit.unknown:
        return f"not clean: {len(audit.violations)} violations, {len(audit.unknown)} places unknown"
    if audit.instructions_fit:
        return f"not clean as it stands; no instruction stands in the way of compiling it for {audit.target}"
    count = sum(violation.kind is Kind.INSTRUCTION for violation in audit.violations)
    return f"not clean: {count} places need an instruction that {audit.target} lacks"
