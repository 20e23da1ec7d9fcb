"""The samplers of llama.cpp in plain Python, from their definitions: {token id: logit} in, out."""

from __future__ import annotations

import math
from itertools import pairwise

from cpuserve.runtime.sampler import uniform

XTC = 0x2545F4914F6CDD1D


def ranked(logits):
    return sorted(logits, key=lambda i: (-logits[i], i))


def probabilities(logits):
    top = max(logits.values())
    mass = {i: math.exp(x - top) for i, x in logits.items()}
    total = math.fsum(mass.values())
    return {i: m / total for i, m in mass.items()}


def only(logits, ids):
    return {i: logits[i] for i in ids}


def entropy(p):
    return -math.fsum(x * math.log(x) for x in p.values() if x > 0)


def penalties(logits, s, tokens, num_prompt):
    last = s.get("repeat_last_n", -1)
    counted = tokens if last < 0 else tokens[max(0, len(tokens) - last) :]
    scored = tokens[num_prompt:] if last < 0 else counted
    out = {}
    for i, x in logits.items():
        if i in counted:
            x = x / s["repeat"] if x > 0 else x * s["repeat"]
        if i in scored:
            x -= scored.count(i) * s["frequency"] + s["presence"]
        out[i] = x
    return out


def dry(logits, s, tokens):
    last = s.get("dry_penalty_last_n", -1)
    tokens = tokens if last < 0 else tokens[max(0, len(tokens) - last) :]
    since = 0
    breakers = s.get("breakers", [])
    while since < len(tokens):
        begin = len(tokens) - 1 - since
        hits = [b for b in breakers if tokens[begin : begin + len(b)] == list(b)]
        if hits:
            since = since + 1 - max(map(len, hits))
            break
        since += 1
    longest = {}
    for end in range(len(tokens) - 1):
        size = 0
        while size <= end and tokens[end - size] == tokens[len(tokens) - 1 - size]:
            size += 1
        size = min(size, since)
        if size >= s["dry_allowed_length"]:
            follows = tokens[end + 1]
            longest[follows] = max(longest.get(follows, 0), size)
    return {
        i: x
        - (
            s["dry_multiplier"] * s["dry_base"] ** (longest[i] - s["dry_allowed_length"])
            if i in longest
            else 0
        )
        for i, x in logits.items()
    }


def top_n_sigma(logits, s):
    values = list(logits.values())
    mean = sum(values) / len(values)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
    return {i: x for i, x in logits.items() if x >= max(values) - s["top_n_sigma"] * sigma}


def typical(logits, s):
    p = probabilities(logits)
    middle = entropy(p)
    kept, total = [], 0.0
    for i in sorted(p, key=lambda i: (abs(-math.log(p[i]) - middle), i)):
        kept.append(i)
        total += p[i]
        if total > s["typical_p"] and len(kept) >= s.get("min_keep", 0):
            break
    return only(logits, kept)


def top_p(logits, s):
    p = probabilities(logits)
    kept, total = [], 0.0
    for i in ranked(logits):
        kept.append(i)
        total += p[i]
        if total >= s["top_p"] and len(kept) >= s.get("min_keep", 0):
            break
    return only(logits, kept)


def min_p(logits, s):
    p = probabilities(logits)
    order = ranked(logits)
    count = sum(p[i] >= s["min_p"] * p[order[0]] for i in order)
    return only(logits, order[: max(count, s.get("min_keep", 0))])


def xtc(logits, s, seed, position):
    if len(logits) < 2 or uniform(seed ^ XTC, position) > s["xtc_probability"]:
        return logits
    p, order = probabilities(logits), ranked(logits)
    reaching = [i for i in order if p[i] >= s["xtc_threshold"]]
    left = order[max(0, len(reaching) - 1) :]
    return logits if len(left) < s.get("min_keep", 0) else only(logits, left)


def temperature(logits, s):
    t, spread = s["temperature"], s.get("dynatemp_range", 0)
    if spread and len(logits) > 1:
        share = entropy(probabilities(logits)) / math.log(len(logits))
        low = max(0, t - spread)
        t = low + (t + spread - low) * share ** s.get("dynatemp_exponent", 1)
    if t < 1e-5:
        best = ranked(logits)[0]
        return {i: x if i == best else -math.inf for i, x in logits.items()}
    return {i: x / t for i, x in logits.items()}


def infill(logits, s, texts, stops, row):
    p = probabilities(logits)
    ends = {i for i in logits if i in stops}
    others = math.fsum(p[i] for i in p if i not in ends)
    if 3 * math.fsum(p[i] for i in ends) * len(p) > others:
        return only(logits, ends)
    order = ranked(logits)
    left = set(order)
    for i in order:
        for j in order:
            if i != j and {i, j} <= left and texts[j].startswith(texts[i]) and texts[i]:
                to, source = (j, i) if p[j] > p[i] else (i, j)
                p[to] += p[source]
                left.discard(source)
    likely = {i for i in left if i not in ends and p[i] >= 0.2}
    if not likely:
        allowed = {i: row[i] for i in stops if row[i] > -math.inf}
        best = ranked(allowed)[0] if allowed else order[0]
        return {best: float(row[best])}
    kept = likely | (ends & left)
    total = math.fsum(p[i] for i in kept)
    least = 1 / (len(likely) + 1)
    return only(logits, [i for i in kept if i in ends or p[i] / total >= least])


def mirostat(logits, s, mu, vocab):
    p, order = probabilities(logits), ranked(logits)
    if s["mirostat"] == 2:
        return only(logits, [i for i in order if i == order[0] or -math.log2(p[i]) <= mu])
    first = order[:100]
    t = [math.log((k + 2) / (k + 1)) for k in range(len(first) - 1)]
    b = [math.log(p[i] / p[j]) for i, j in pairwise(first)]
    exponent = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    excess = exponent - 1
    k = (excess * 2**mu / (1 - vocab ** (-excess))) ** (1 / exponent)
    return only(logits, order[: max(int(k), 1)])


class Oracle:
    """Samples one row after another; s: the settings by name."""

    def __init__(self, s, order, seed=0, prompt=(), stops=(), texts=()):
        self.s, self.order, self.seed = s, order, seed
        self.tokens, self.num_prompt = list(prompt), len(prompt)
        self.stops, self.texts = stops, texts
        self.mu = 2 * s.get("mirostat_tau", 5.0)

    def row(self, logits, position):
        """Return (the sampled token, {id: p} after all samplers); barred tokens are -inf."""
        s = self.s
        left = {i: float(x) for i, x in enumerate(logits) if x > -math.inf}
        runs = {
            "penalties": lambda x: penalties(x, s, self.tokens, self.num_prompt),
            "dry": lambda x: dry(x, s, self.tokens),
            "top_n_sigma": lambda x: top_n_sigma(x, s),
            "top_k": lambda x: only(x, ranked(x)[: s["top_k"]]),
            "typ_p": lambda x: typical(x, s),
            "top_p": lambda x: top_p(x, s),
            "min_p": lambda x: min_p(x, s),
            "xtc": lambda x: xtc(x, s, self.seed, position),
            "temperature": lambda x: temperature(x, s),
            "infill": lambda x: infill(x, s, self.texts, self.stops, logits),
        }
        for name in self.order:
            left = runs[name](left)
        if s.get("mirostat"):
            left = mirostat(left, s, self.mu, len(logits))
        p = probabilities(left)
        at, running = uniform(self.seed, position), 0.0
        for token in sorted(i for i in p if p[i] > 0):
            running += p[token]
            if running > at:
                break
        self.mu -= s.get("mirostat_eta", 0.1) * (-math.log2(p[token]) - s.get("mirostat_tau", 5.0))
        self.tokens.append(token)
        return token, p
