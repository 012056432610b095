"""Registration: what SGLang calls at load (entry point `replayssm` in the group `sglang.srt.plugins`)."""

from __future__ import annotations

import logging

from sglang_replayssm import __version__, arguments, seams

logger = logging.getLogger(__name__)


def register() -> None:
    """Check the hook table and register everything, or register nothing and say why.

    Runs in every process of a server, before its arguments are known; each hook is a pass-through without the flag.
    """
    if arguments.disabled_by_environment():
        logger.info("sglang-replayssm is switched off by %s.", arguments.DISABLE_ENV)
        return
    version = seams.sglang_version()
    try:
        differences = seams.differences()
    except Exception as error:
        differences = [f"the hook table could not be checked: {error!r}"]
    if differences:
        logger.error(
            "sglang-replayssm %s does not fit SGLang %s and stays off; %s now behaves as in plain SGLang. Differences: "
            "%s. Fix: install sglang==%s, or a newer sglang-replayssm.",
            __version__,
            version,
            arguments.FLAG,
            "; ".join(differences),
            seams.TESTED_SGLANG[0],
        )
        return
    if version not in seams.TESTED_SGLANG:
        logger.warning(
            "sglang-replayssm %s is tested with SGLang %s; this is %s. Every hook matches, so it goes on.",
            __version__,
            ", ".join(seams.TESTED_SGLANG),
            version,
        )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_replayssm.hooks import HOOKS

    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    register_resolution_hook("handle_linear_attn_backend")(arguments.resolve)


def require_live_hooks() -> None:
    """Raise RuntimeError when the flag is on but a hook did not reach its target (SGLang only logs that)."""
    from sglang_replayssm.hooks import HOOKS

    missing = seams.missing_hooks(HOOKS)
    if missing:
        raise RuntimeError(
            f"{arguments.FLAG}: SGLang did not apply the hook(s) of sglang-replayssm on {', '.join(missing)}. Another "
            "plugin may replace these classes: exclude it with SGLANG_PLUGINS, run sglang-replayssm-check, or drop the flag."
        )
