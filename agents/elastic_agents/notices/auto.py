"""Detects where this node is, where that is cheap: from firmware files and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DMI = Path("/sys/class/dmi/id")
"""The firmware's description of the machine, which the kernel makes readable to all users."""

FIELDS = ("sys_vendor", "product_name", "product_version", "bios_vendor", "bios_version", "chassis_asset_tag")

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of every Azure machine; Hyper-V elsewhere has a different one."""


def kinds_here(environ: Mapping[str, str], dmi: Mapping[str, str]) -> list[str]:
    """Return the kinds of sources that this node has."""
    cloud = cloud_of(dmi)
    return (["slurm"] if "SLURM_JOB_ID" in environ else []) + ([cloud] if cloud else [])


def cloud_of(dmi: Mapping[str, str]) -> str | None:
    """Return the cloud that the machine's firmware names: ``aws``, ``gcp``, ``azure`` or None.

    EC2: "Identify EC2 instances" in its User Guide; instances on Xen have Amazon only in a version. GCP: "Detect if a
    VM is running in Compute Engine".
    """
    if dmi.get("sys_vendor") == "Amazon EC2" or any(
        "amazon" in dmi.get(field, "").lower() for field in ("bios_vendor", "bios_version", "product_version")
    ):
        return "aws"
    if dmi.get("product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if dmi.get("chassis_asset_tag") == AZURE_TAG else None


def read_dmi(directory: Path = DMI) -> dict[str, str]:
    """Return those of FIELDS that exist."""
    found = {}
    for field in FIELDS:
        try:
            found[field] = (directory / field).read_text(errors="replace").strip()
        except OSError:
            continue  # no such firmware, or a container that hides it
    return found
