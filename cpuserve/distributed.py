"""cleanup_dist_env_and_memory of vLLM, for programs that make several LLMs one after the other."""

from __future__ import annotations

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the objects that nothing refers to, such as the LLM that was deleted before.

    shutdown_ray: has no effect, because `LLM` does not use Ray.
    """
    del shutdown_ray
    gc.collect()
