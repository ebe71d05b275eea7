"""Profiles: what the vendor says about each GPU, with the source of every figure.

A profile is one YAML file in `profiles/`. It gives the compile target, the pattern that the CUDA device name must
match, and vendor figures. The figures are the published ones; the device itself is asked at run time
(`kda_lib.lab.device`), so parts that share a profile may differ from it and the result file shows by how much.
"""

import re
from importlib import resources
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

FIGURES = ("sms", "bandwidth_bytes_per_s", "l2_bytes", "smem_per_block_bytes", "memory_bytes", "boost_clock_hz")
"""Fields of `Profile` that are vendor figures; each one given needs an entry in `sources`."""

CPU = "cpu"
"""Name of the profile without a device: it compiles for its target and runs nothing."""

_PROFILES = resources.files("kda_lib.lab") / "profiles"


class UnknownProfile(ValueError):
    """No profile has this name; the message lists the names that exist."""


class Profile(BaseModel):
    """One GPU as its vendor describes it.

    Units are in the field names: bytes, bytes per second, hertz. `smem_per_block_bytes` is the opt-in maximum of
    shared memory for one CTA, `bandwidth_bytes_per_s` the peak DRAM bandwidth. Published GB and TB are powers of ten,
    published KB and MB of on-chip memory powers of two. A figure without a published source is None and `notes` says
    so.

    Raises:
        pydantic.ValidationError: unknown field, wrong type, a figure without a source or a source without a figure.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    title: Annotated[str, Field(min_length=1)]
    target: Annotated[str, Field(pattern=r"^sm_\d{2,3}[af]?$")]
    device_pattern: str | None = None
    sms: PositiveInt | None = None
    bandwidth_bytes_per_s: PositiveInt | None = None
    l2_bytes: PositiveInt | None = None
    smem_per_block_bytes: PositiveInt | None = None
    memory_bytes: PositiveInt | None = None
    boost_clock_hz: PositiveInt | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    notes: str = ""

    @model_validator(mode="after")
    def _every_figure_has_a_source(self) -> "Profile":
        given = {figure for figure in FIGURES if getattr(self, figure) is not None}
        if missing := sorted(given - self.sources.keys()):
            raise ValueError(f"figures without a source: {', '.join(missing)}; add each to sources, or remove it")
        if spare := sorted(self.sources.keys() - given):
            raise ValueError(f"sources for figures that are not given: {', '.join(spare)}")
        if unlinked := sorted(name for name, text in self.sources.items() if "https://" not in text):
            raise ValueError(f"sources must hold a document title and its https URL: {', '.join(unlinked)}")
        if self.device_pattern is None and given:
            raise ValueError(f"a profile without device_pattern has no device figures; got {', '.join(sorted(given))}")
        return self

    def fits(self, device_name: str) -> bool:
        """Whether a CUDA device of this name belongs to the profile (the pattern must match the whole name)."""
        return self.device_pattern is not None and re.fullmatch(self.device_pattern, device_name) is not None


def profile_names() -> list[str]:
    """Names of all profiles, sorted, `cpu` first."""
    names = sorted(file.name.removesuffix(".yaml") for file in _PROFILES.iterdir() if file.name.endswith(".yaml"))
    return sorted(names, key=lambda name: name != CPU)


def load_profile(name: str) -> Profile:
    """Read and validate one profile.

    Raises:
        UnknownProfile: no such name; the message lists all names.
        ValueError: the file does not hold a valid profile of that name.
    """
    if name not in profile_names():
        raise UnknownProfile(f"GPU profile: expected one of {', '.join(profile_names())}; got {name!r}")
    text = (_PROFILES / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        profile = Profile.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"profiles/{name}.yaml is not a valid profile: {error}") from error
    if profile.name != name:
        raise ValueError(f"profiles/{name}.yaml: expected name: {name}; got {profile.name!r}")
    return profile


def match_profile(device_name: str) -> Profile | None:
    """The profile whose pattern fits a CUDA device name (for example "NVIDIA H200"), or None."""
    for name in profile_names():
        profile = load_profile(name)
        if profile.fits(device_name):
            return profile
    return None
