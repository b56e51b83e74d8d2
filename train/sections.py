"""The sections of a report, written from the run's record for readers who were not there.

Each takes a `training_record` and gives blocks of Markdown.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from ..checkpoints.markdown import escape, figure, prose, table
from .charts import describe_hop
from .evaluate import TARGET

Run = Mapping[str, Any]

MOST_CURVE_ROWS = 12


def summary(run: Run) -> list[str]:
    """What a reader in a hurry takes away."""
    base, hops = run["base"], run["acceptance"]["hops"]
    draft = str(run["heads"][0]["exit_layer"])
    length = run["predicted_length"]["single-layer"][draft]["greedy"][1]
    about = f"""
        Early-exit heads for {escape(base["source"] or "a local model")}: {base["num_layers"]} layers, hidden size
        {base["hidden_size"]}, {base["vocab_size"]} token ids, {base["num_parameters"] / 1e6:,.0f} million parameters.
        A head guesses the model's next token from an early layer; hispec lets the guesses run ahead and has the whole
        model check several at once. The text is the model's own, whatever the heads guess: they decide only the
        speed, and how well they guess is what this report says. Every number of it is in `run.json` too.
        """
    points = [
        f"""- The draft, behind {_layers(draft)}, guesses the model's own token
        **{_percent(hops[f"{draft}->{TARGET}"]["agreement"])}** of the time.""",
        f"""- Drafts of 2 tokens (`single-layer`, greedy) should commit **{length:.2f}** tokens per verification by the
        whole model; plain decoding commits 1.""",
        *(f"- {sentence}" for sentence in judge_levels(run)),
    ]
    return [prose(about), "\n".join(map(prose, points))]


def judge_levels(run: Run) -> list[str]:
    """For each pair of exits a sentence on whether the deeper one can serve as the middle level."""
    hops = run["acceptance"]["hops"]
    sentences = []
    for draft, middle in combinations([str(head["exit_layer"]) for head in run["heads"]], 2):
        ours, below = (hops[f"{level}->{TARGET}"]["agreement"] for level in (middle, draft))
        compared = f"""it agrees with the model on {_percent(ours)} of tokens, the exit behind {_layers(draft)} on
            {_percent(below)}."""
        if ours > below:
            sentence = f"""The exit behind {_layers(middle)} can serve as the middle level over {_layers(draft)}:
                {compared} Whether that is worth the time of its layers, only a timed run tells."""
        else:
            sentence = f"""**The exit behind {_layers(middle)} agrees with the model no more than the draft behind
                {_layers(draft)}**: {compared} As a middle level it turns down drafts that the model would keep, and
                what it passes on is kept no more often: prefer `single-layer`."""
        sentences.append(prose(sentence))
    return sentences


def making(run: Run) -> list[str]:
    """What was trained, on what, by which command."""
    heads = [
        [
            str(head["exit_layer"]),
            head["kind"],
            "yes" if head["committed_context"] else "no",
            "all" if head["draft_vocab_size"] is None else str(head["draft_vocab_size"]),
            str(head["num_parameters"]),
            f"{head['num_bytes'] / 1e6:.2f}",
        ]
        for head in run["heads"]
    ]
    settings = [
        [f"{part}.{name}", value if isinstance(value, str) else json.dumps(value)]
        for part in ("data", "training")
        for name, value in run["recipe"][part].items()
    ]
    trained = (
        f"""Trained on {run["num_training_responses"]} responses ({run["num_training_tokens"]} tokens) that the model
        itself gave"""
        if run["curve"]
        else "Nothing was trained: these exits read the model's layers as they are. The model answered"
    )
    measured = f"""{trained}; measured on {run["acceptance"]["num_tokens"]} tokens of {run["num_held_out_responses"]}
        other responses, to prompts that were held out. The command, and what it ran with:"""
    return [
        table(["layers run", "kind", "committed context", "token ids scored", "parameters", "MB"], heads),
        prose(measured),
        "    " + prose(shlex.join(run["command"])),
        escape(", ".join(f"{name} {version}" for name, version in run["versions"].items())),
        table(["setting", "value"], settings),
    ]


def training_curve(run: Run) -> list[str]:
    """Loss and agreement over the tokens seen."""
    curve = run["curve"]
    if not curve:
        return ["Nothing was trained, so there is no curve."]
    exits = [str(head["exit_layer"]) for head in run["heads"]]
    hops = main_hops(run["acceptance"]["hops"])
    last = len(curve) - 1
    chosen = sorted({round(last * place / (MOST_CURVE_ROWS - 1)) for place in range(MOST_CURVE_ROWS)})
    rows = [
        [
            str(record["step"]),
            str(record["num_tokens"]),
            *(f"{record['loss'][name]:.3f}" if name in record["loss"] else "-" for name in exits),
            *(f"{record[hop]['agreement']:.3f}" for hop in hops),
        ]
        for record in (curve[place] for place in chosen)
    ]
    header = ["step", "tokens seen", *(f"loss, exit {name}" for name in exits), *map(describe_hop, hops)]
    how_to_read = """
        The loss is a mean over the steps since the last measurement; the other columns are agreement on held-out
        responses, see below. A curve that still rises at its end asks for more data or more passes.
        """
    return [
        prose(how_to_read),
        figure("loss", "training loss of each exit over the tokens seen"),
        figure("agreement", "agreement of each pair of levels over the tokens seen"),
        table(header, rows),
    ]


def acceptance(run: Run) -> list[str]:
    """Agreement and expected acceptance by exit and hop, by kind and by position."""
    measured = run["acceptance"]
    hops, columns, distances = measured["hops"], main_hops(measured["hops"]), measured["by_distance"]
    names = [describe_hop(hop) for hop in hops]
    by_hop = [
        [describe_hop(hop), f"{values['agreement']:.3f}", f"{values['acceptance']:.3f}"] for hop, values in hops.items()
    ]
    by_kind = [
        [kind, str(measured["num_tokens_by_kind"][kind]), *(_pair(values[hop]) for hop in columns)]
        for kind, values in measured["by_kind"].items()
    ]
    by_distance = [[describe_hop(hop), *(_pair(values[hop]) for values in distances.values())] for hop in hops]
    by_place = [[describe_hop(hop), *_shares(measured["by_place"][hop], len(distances))] for hop in hops]
    how_to_read = f"""
        {names[-1]} reads: of what the exit behind {_layers(names[-1].split()[0])} proposes, so much survives the
        target, the whole model. *Agreement* is the share of places where both find the same token likeliest, which is
        what greedy decoding keeps. *Expected acceptance* is the share kept when sampling at temperature 1.
        """
    kinds = """
        By kind of data, agreement / expected acceptance. Of n tokens, agreement is known to about 0.5 / √n.
        """
    position = f"""
        By position in the draft, which is how many tokens ago the newest committed state was taken; agreement /
        expected acceptance. {
        "It falls as far as the heads miss what was drafted since."
        if any(head["committed_context"] for head in run["heads"])
        else "No head here sees a committed state, so all positions are alike."
    }"""
    given = """
        Agreement at the same positions, given that it never failed before in the draft: higher, because what is easy
        stays easy for a while. The tokens between are the response's own, and a draft may begin anywhere. Decoding
        begins more drafts where it is hard, because it runs through what is easy; so it meets less than this.
        """
    return [
        prose(how_to_read),
        table(["from → to", "agreement", "expected acceptance"], by_hop),
        prose(kinds),
        figure("kinds", "agreement with the target by kind of data"),
        table(["kind", "tokens", *map(describe_hop, columns)], by_kind),
        prose(position),
        figure("position", "agreement of each pair of levels by position in the draft"),
        table(["from → to", *distances], by_distance),
        prose(given),
        table(["from → to", *distances], by_place),
    ]


def confidence(run: Run) -> list[str]:
    """How far the probability that an exit gives its token is the share of times that it is right."""
    cells = {
        name: {entry["from"]: entry for entry in entries} for name, entries in run["acceptance"]["calibration"].items()
    }
    rows = [
        [
            f"{tenth:.1f} to {tenth + 0.1:.1f}",
            *(
                f"{entry['agreement']:.3f} of {entry['num_tokens']}" if (entry := by_tenth.get(tenth)) else "-"
                for by_tenth in cells.values()
            ),
        ]
        for tenth in sorted({tenth for by_tenth in cells.values() for tenth in by_tenth})
    ]
    errors = ", ".join(f"{_error(by_tenth.values()):.3f} (exit {name})" for name, by_tenth in cells.items())
    how_to_read = f"""
        When an exit gives its likeliest token so much probability, that token is the target's this often, of so many
        tokens. On average the two differ by {errors}; the less, the better `draft_policy="dynamic"` knows when to stop
        drafting.
        """
    return [
        prose(how_to_read),
        figure("confidence", "share of agreement over the confidence of each exit"),
        table(["confidence", *(f"exit {name}" for name in cells)], rows),
    ]


def length(run: Run) -> list[str]:
    """The predicted acceptance length of every method."""
    predicted = run["predicted_length"]
    rows = [
        [f"{method} {describe_hop(exits)}, {rule}", *(f"{value:.2f}" for value in values)]
        for method in ("single-layer", "hispec")
        for exits, rules in predicted[method].items()
        for rule, values in rules.items()
    ]
    draft = str(run["heads"][0]["exit_layer"])
    greedy = predicted["single-layer"][draft]["greedy"]
    meaning = f"""
        The acceptance length is the number of tokens committed per verification by the whole model. The
        {greedy[1]:.2f} for drafts of 2 tokens from exit {draft} mean: plain decoding runs its
        {run["base"]["num_layers"]} layers once for every token, speculation runs those behind the exits once for every
        {greedy[1]:.2f} tokens. That is not the speed yet: a longer draft pays only while the length still rises by
        more than one more drafted token costs.
        """
    counted = f"""
        Counted along the held-out responses: each is gone through as decoding does it, from its beginning, a draft
        after each verification, with what every exit says at every position. Drafts of K = `num_draft_tokens` go to the
        target, or under `hispec` to the intermediate, one after another, each adding the tokens that were kept and one
        of the intermediate's own, until `num_provisional_tokens` = {predicted["num_provisional_tokens"]} or more wait.
        *greedy* goes by agreement, over the model's greedy responses if there are any; *sampled* (temperature 1,
        rejection rule) by the expected acceptance. As `hispec` puts {predicted["num_provisional_tokens"]} or more
        tokens before the target whatever K is, compare it with `single-layer` at
        {predicted["num_provisional_tokens"]}.
        """
    by_shares = f"""
        With the share kept at place 1, 2, ... of those that got there, as if drafts began anywhere alike, which says
        more than decoding reaches with long drafts: `single-layer` commits 1 + a1 + a1 a2 + ... tokens (a: kept by the
        target, of the draft's), `hispec` 1 + P(m ≥ 1) c1 + P(m ≥ 2) c1 c2 + ... (c: kept by the target, of the
        intermediate's), where m tokens wait, {predicted["num_provisional_tokens"]} or more. *greedy* takes agreement,
        *sampled* the expected acceptance by position, as if the positions were independent.
        """
    return [
        prose(meaning),
        figure("length", "predicted acceptance length over num_draft_tokens"),
        table(["num_draft_tokens", *map(str, range(1, len(greedy) + 1))], rows),
        prose(counted if "courses" in run["acceptance"] else by_shares),
    ]


def main_hops(hops: Iterable[str]) -> list[str]:
    """The pairs of levels that a table with little room shows: each exit to the target, and to the next exit."""
    hops = list(hops)
    levels = [*dict.fromkeys(hop.split("->")[0] for hop in hops), TARGET]
    shown = {f"{a}->{b}" for a, b in pairwise(levels)} | {f"{level}->{TARGET}" for level in levels}
    return [hop for hop in hops if hop in shown]


def _shares(chain: Mapping[str, Sequence[float]], num_places: int) -> list[str]:
    shares = [f"{share:.3f}" for share in chain["agreement"]]
    return shares + ["-"] * (num_places - len(shares))


def _error(entries: Iterable[Mapping[str, float]]) -> float:
    """Mean difference of confidence and agreement, over tokens."""
    weighted = [(entry["num_tokens"], abs(entry["confidence"] - entry["agreement"])) for entry in entries]
    return sum(number * gap for number, gap in weighted) / max(1, sum(number for number, _ in weighted))


def _pair(values: Mapping[str, float]) -> str:
    return f"{values['agreement']:.3f} / {values['acceptance']:.3f}"


def _layers(exit_layer: str) -> str:
    return {"0": "no layer", "1": "1 layer"}.get(exit_layer, f"{exit_layer} layers")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
