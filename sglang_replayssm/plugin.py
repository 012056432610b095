"""Registration: what SGLang calls at load (entry point `replayssm` in the group `sglang.srt.plugins`)."""

from __future__ import annotations

import logging
import os

from sglang_replayssm import __version__, arguments, seams

logger = logging.getLogger(__name__)


def register() -> None:
    """Check the hook table and register everything, or register nothing and say why.

    Runs in every process of a server, before its arguments are known; each hook is a pass-through without the flag.

    Raises:
        SystemExit: the launcher accepted the flag but this process of the server can not honour it. SGLang swallows
            an Exception here, and the server would run without buffered decode and without a word.
    """
    if arguments.disabled_by_environment():
        logger.info("sglang-replayssm is switched off by %s.", arguments.DISABLE_ENV)
        return
    try:
        problem = _register()
    except Exception as error:
        logger.exception("sglang-replayssm could not be loaded")
        problem = f"it could not be loaded ({error!r})"
    if problem is None:
        return
    message = f"sglang-replayssm {__version__} stays off: {problem}"
    if os.environ.get(arguments.REQUIRED_ENV):
        raise SystemExit(f"{message} The launch is given up, because {arguments.FLAG} asks for it.")
    logger.error("%s %s now behaves as in plain SGLang.", message, arguments.FLAG)


def _register() -> str | None:
    """Register resolution hook and hooks; or nothing, and return what is wrong as a sentence."""
    version = seams.sglang_version()
    differences = seams.differences()
    if differences:
        return (
            f"it does not fit SGLang {version}. Differences: {'; '.join(differences)}. "
            f"Fix: install sglang=={seams.TESTED_SGLANG[0]}, or a newer sglang-replayssm."
        )
    if version not in seams.TESTED_SGLANG and os.environ.get(arguments.WARNED_ENV) != version:
        os.environ[arguments.WARNED_ENV] = str(version)
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
    return None


def require_live_hooks() -> None:
    """Raise RuntimeError when the flag is on but a hook did not reach its target (SGLang only logs that)."""
    from sglang_replayssm.hooks import HOOKS

    missing = seams.missing_hooks(HOOKS)
    if missing:
        raise RuntimeError(
            f"{arguments.FLAG}: SGLang did not apply the hook(s) of sglang-replayssm on {', '.join(missing)}. Another "
            "plugin may replace these classes: exclude it with SGLANG_PLUGINS, run sglang-replayssm-check, or drop "
            "the flag."
        )
