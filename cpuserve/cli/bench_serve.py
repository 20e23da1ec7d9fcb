"""`cpuserve bench serve`: measure a running OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.bench.driver import CHAT, COMPLETIONS, LoadError, Target, fetch
from cpuserve.bench.measure import counted
from cpuserve.bench.observe import where
from cpuserve.bench.results import (
    METRICS,
    Report,
    details,
    file_name,
    goodput_bounds,
    markdown,
    records,
    render,
    summary,
)
from cpuserve.bench.schema import commit
from cpuserve.bench.traffic import Pace, Run, count_tokens, drive
from cpuserve.bench.workload import Workload, talks
from cpuserve.cli.bench_drawing import report_view
from cpuserve.cli.drawing import say_drawn
from cpuserve.cli.measuring import tell, workload_of
from cpuserve.cli.terminal import note, say
from cpuserve.config.values import base_url


def serve(args: argparse.Namespace) -> int:
    """Send requests to a running server, and print and save its rates and latencies.

    Returns the exit code: 1 if a request failed.
    """
    metrics = args.percentile_metrics.split(",")
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown:
        msg = f"flag --percentile-metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}"
        raise ConfigError(msg)
    bounds = goodput_bounds(args.goodput)
    metadata = _metadata(args.metadata)
    report = asyncio.run(_run(args))
    shown = replace(
        report, goodput=bounds, metrics=metrics, percentiles=tuple(args.metric_percentiles)
    )
    if args.json:
        for found in records(shown):
            say(found.to_json())
    else:
        _say_report(shown)
    if args.save_result or args.save_detailed:
        note(f"saved {_save(args, shown, metadata)}")
    for error in dict.fromkeys(report.run.errors[:3]):
        note(f"a request failed: {error}")
    return 1 if report.run.errors else 0


def _say_report(report: Report) -> None:
    """Print the report, on a terminal with distributions, and a table that can be pasted."""
    say_drawn(lambda: render(report), lambda console: report_view(console, report))
    say(f"\n{markdown(report)}")


async def _run(args: argparse.Namespace) -> Report:
    target = await _target(args)
    workload = workload_of(args, args.seed)
    asked = await talks(workload, partial(count_tokens, target))
    pace = Pace(args.request_rate or float("inf"), args.burstiness, args.max_concurrency)
    tell(f"{len(asked)} requests to {target.url}")
    run: Run = await drive(
        target,
        asked,
        pace,
        seed=args.seed,
        warm_ups=args.num_warmups,
        each=counted(sum(map(len, asked)), (lambda _: None) if args.disable_tqdm else tell),
        **_sampling(args),
    )
    if not run.timings:
        msg = f"every request failed; the first one: {run.errors[0]}"
        raise LoadError(msg)
    return Report(run, await where(target), pace, _parameters(workload, pace))


async def _target(args: argparse.Namespace) -> Target:
    """Return the server and the name of its model; ConfigError if the server does not respond."""
    url = args.url or f"http://{args.host}:{args.port}"
    chat = args.backend == "openai-chat"
    endpoint = args.endpoint or (CHAT if chat else COMPLETIONS)
    target = Target(base_url(url), "", args.api_key, endpoint)
    name = args.served_model_name or args.model
    try:
        code, body = await fetch(target, "/v1/models")
        known = msgspec.json.decode(body)["data"] if code == 200 else []
        name = name or known[0]["id"]
    except (IndexError, KeyError, msgspec.DecodeError):
        wanted = "--api-key" if code in (401, 403) else "--model"
        msg = f"{target.url} does not list its models (HTTP {code}); set {wanted}"
        raise ConfigError(msg) from None
    except LoadError as error:
        msg = f"{error}. Start a server with `cpuserve serve`, or set --host, --port or --url"
        raise ConfigError(msg) from None
    return replace(target, model=name)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters of every request, such as temperature."""
    more = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    more = {name: value for name, value in more.items() if value is not None}
    return {**more, "ignore_eos": args.ignore_eos}


def _parameters(workload: Workload, pace: Pace) -> dict[str, float | str]:
    """Return the settings of a run; only runs with equal settings can be compared."""
    found: dict[str, float | str] = {
        "dataset": workload.dataset,
        "num_prompts": workload.num_prompts,
        "rate": pace.rate if pace.rate != float("inf") else "inf",
        "seed": workload.seed,
    }
    if workload.dataset != "sharegpt":
        found |= {"input_len": workload.input_len, "output_len": workload.output_len}
    if pace.concurrency:
        found["concurrency"] = pace.concurrency
    return found


def _metadata(pairs: list[str]) -> dict[str, str]:
    wrong = next((pair for pair in pairs if "=" not in pair), None)
    if wrong is not None:
        msg = f"flag --metadata={wrong}: give KEY=VALUE"
        raise ConfigError(msg)
    return dict(pair.split("=", 1) for pair in pairs)


def _save(args: argparse.Namespace, report: Report, metadata: dict[str, str]) -> Path:
    """Write the result file and return its path."""
    now = datetime.now()
    label = args.label or args.backend
    name = args.result_filename or file_name(label, report, report.where.model, now)
    path = Path(args.result_dir or ".") / name
    result = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "backend": args.backend,
        "label": args.label,
        "model_id": report.where.model,
        "num_prompts": args.num_prompts,
        "commit": commit(),
        **metadata,
        **summary(report),
        **(details(report.run) if args.save_detailed else {}),
        "records": records(report),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}"
        raise ConfigError(msg) from None
    return path
