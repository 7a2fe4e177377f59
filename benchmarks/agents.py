"""Turns of agents between requests of others, with sessions of agents and without. Prints one JSON line.

Agents take turns in sequence; after each turn others ask with prompts of their own, so that more tokens come
between two turns of an agent than all pages hold. Seconds are from the request of a turn, but an agent's
first one, to its first new token. Tokens of earlier turns are found again, or they are not.

Prediction: without sessions every turn is computed from its first token, with them only its new tokens and
the answer's last one: about 65 of 600 to 900, so a tenth of the time or less.
"""

import argparse
import json
import random
import statistics
from typing import Any, Final

from restart import ask, make_model
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.session.requests.prompt import AgentTurn

AGENTS: Final = 8
NEW: Final = 32
FIRST: Final = 512
"""Tokens of an agent's first prompt, and of each prompt of others."""
MORE: Final = 64
"""Tokens that an agent adds in a turn."""
OTHERS: Final = 3
"""Requests of others after a turn."""
PAGES: Final = 800


def run(kv: str, num_turns: int, has_sessions: bool) -> dict[str, Any]:
    """Seconds of the turns, their tokens, and the share of earlier tokens that was found."""
    model, draw = make_model(), random.Random(0)
    continuous_batching(model, kv)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=PAGES, max_batch_tokens=2048)
    texts: list[list[int]] = [[] for _ in range(AGENTS)]
    seconds, found, known = [], 0, 0

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 4096) for _ in range(count)]

    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        for number in range(num_turns):
            for agent, text in enumerate(texts):
                prompt, before = text + tokens(MORE if number else FIRST), manager.report().tokens_found
                turn = AgentTurn("", str(agent)) if has_sessions else None
                first, answer = ask(manager, prompt, agent_turn=turn)
                if number:
                    seconds.append(first)
                    known += len(text) - 1  # the last token of an answer is computed with what follows
                    found += manager.report().tokens_found - before
                texts[agent] = prompt + answer
                for _ in range(OTHERS):
                    ask(manager, tokens(FIRST))
    continuous_batching(model, None)
    return {"seconds": statistics.median(seconds), "found": found / known, "texts": texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--kv", nargs="+", default=["auto", "int8"])
    args = parser.parse_args()
    rows = []
    for kv in args.kv:
        without, with_sessions = (run(kv, args.turns, has_sessions) for has_sessions in (False, True))
        row = {"kv": kv, "same": without.pop("texts") == with_sessions.pop("texts")}
        rows.append({**row, "without": without, "with": with_sessions})
    print(json.dumps({"figure": "agents", "turns": args.turns, "rows": rows}))


if __name__ == "__main__":
    main()
