"""What is done with an engine for each of vLLM's features. The tests compare what came out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engine.feature_engine import FEW, Engine, Tokens, prompt

# ---- checks whose outcome must be stock vLLM's ---------------------------------------------------------


def conversation(e: Engine) -> Any:
    """Five turns of one conversation, over many seal boundaries."""
    context, said = [], []
    for turn in range(5):
        context += prompt(f"turn{turn}", 50)
        (((answer),),) = e.tokens([context], max_tokens=30)
        said.append(answer)
        context = context + answer
    return said


def batch(e: Engine) -> Any:
    return e.tokens([prompt(f"batch{i}", 20 + 35 * i) for i in range(7)], max_tokens=40)


def cuts(e: Engine) -> Any:
    """The same batch under token budgets of a step from tiny to all, and with long prompts held back."""
    prompts = [prompt("cut", 150), prompt("cut2", 61), prompt("cut3", 290)]
    found = []
    for budget, threshold in ((3, 0), (16, 0), (33, 0), (100, 0), (8192, 0), (8192, 24)):
        e.forget()
        with e.cut(budget, long_prefill_token_threshold=threshold):
            found.append(e.tokens(prompts, max_tokens=20))
    return found


def one_at_a_time(e: Engine) -> Any:
    before, e.scheduler.max_num_active_reqs = e.scheduler.max_num_active_reqs, 1
    try:
        return e.tokens([prompt(f"single{i}", 90 + i) for i in range(3)])
    finally:
        e.scheduler.max_num_active_reqs = before


def logprobs(e: Engine) -> Any:
    (output,) = e.outputs([prompt("logprobs", 130)], logprobs=5, max_tokens=12)
    steps = output.outputs[0].logprobs
    return [sorted((token, one.logprob) for token, one in step.items()) for step in steps]


def prompt_logprobs(e: Engine) -> Any:
    """On a prompt that is in the cache already: all of it must be computed again all the same."""
    tokens = prompt("prompt-logprobs", 200)
    e.outputs([tokens])
    with e.cut(70):
        (output,) = e.outputs([tokens], prompt_logprobs=3, max_tokens=4)
    steps = [sorted((t, one.logprob) for t, one in step.items()) for step in output.prompt_logprobs[1:]]
    return {"cached": output.num_cached_tokens, "steps": steps}


def samples(e: Engine) -> Any:
    """n>1 and seeds: what a seed gives does not depend on the company or on the cuts (which stock vLLM's
    worker on a CPU does not survive: tangram/cpu_worker.py)."""
    tokens, params = prompt("samples", 170), {"temperature": 0.8, "seed": 5, "n": 3}
    alone = e.tokens([tokens], **params)[0]
    e.forget()
    with e.cut(41 if e.ours else 2048):
        company = e.tokens([prompt("other", 80), tokens, prompt("third", 110)], **params)[1]
    return {"alone": alone, "company": company}


def beam(e: Engine) -> Any:
    from vllm.sampling_params import BeamSearchParams

    given = [{"prompt_token_ids": prompt("beam", 120)}]
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    (found,) = e.llm.beam_search(given, params)
    return [list(sequence.tokens) for sequence in found.sequences]


def stops(e: Engine) -> Any:
    """Stop strings, stop tokens, a minimum of tokens, forbidden words, and the penalties."""
    tokens = prompt("stops", 100)
    (plain,) = e.outputs([tokens], max_tokens=40)
    text, ids = plain.outputs[0].text, list(plain.outputs[0].token_ids)
    word = text[len(text) // 2 :][:5]
    cases: dict[str, dict[str, Any]] = {
        "string": {"stop": [word]},
        "included": {"stop": [word], "include_stop_str_in_output": True},
        "token": {"stop_token_ids": [ids[15]]},
        "least": {"stop_token_ids": [ids[3], ids[20]], "min_tokens": 10},
        "forbidden": {"bad_words": [e.llm.get_tokenizer().decode([ids[0]])]},
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    }
    found = {"plain": [text, ids, None]}
    for name, params in cases.items():
        (output,) = e.outputs([tokens], max_tokens=40, **params)
        one = output.outputs[0]
        found[name] = [one.text, list(one.token_ids), one.stop_reason]
    return found


def bias(e: Engine) -> Any:
    """What vLLM does not allow together with speculation."""
    (((first, *_),),) = e.tokens([prompt("bias", 90)])
    return e.tokens([prompt("bias", 90)], logit_bias={first: -100.0}, min_p=0.01)


def processor(e: Engine) -> Any:
    """A logits processor of the user's own, beside a request that does not ask for it."""
    from vllm import SamplingParams

    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**greedy, extra_args={"odd": odd}) for odd in (True, False)]
    given = [{"prompt_token_ids": prompt("processor", 110)}] * 2
    return [list(o.outputs[0].token_ids) for o in e.llm.generate(given, params, use_tqdm=False)]


def structured(e: Engine) -> Any:
    from vllm.sampling_params import StructuredOutputsParams as Form

    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
        "required": ["colour", "sure"],
        "additionalProperties": False,
    }
    forms = {"choice": Form(choice=["yes", "no"]), "regex": Form(regex="[0-9]{3}-[0-9]{4}")}
    forms["json"] = Form(json=schema)
    found = {}
    for name, form in forms.items():
        (output,) = e.outputs([prompt(name, 140)], structured_outputs=form, ignore_eos=False, max_tokens=60)
        found[name] = output.outputs[0].text
    return found


def adapters(e: Engine) -> Any:
    """Base and two adapters on one prompt, alone, then together, then each one's second turn."""
    tokens, found = prompt("adapters", 130), {}
    alone = [e.outputs([tokens], adapter=e.adapter(which))[0] for which in (None, 0, 1)]
    found["cached at first"] = [output.num_cached_tokens for output in alone]
    found["alone"] = answers = [list(output.outputs[0].token_ids) for output in alone]
    longer = [tokens + answer + prompt("more", 20) for answer in answers]
    which = [e.adapter(i) for i in (None, 0, 1)]
    together = e.outputs(longer, adapter=which)
    found["cached at second"] = [output.num_cached_tokens for output in together]
    found["second"] = [list(output.outputs[0].token_ids) for output in together]
    found["second alone"] = []
    for one, who in zip(longer, which, strict=True):
        e.forget()
        found["second alone"] += e.tokens([one], adapter=who)[0]
    e.forget()
    found["second anew"] = [list(o.outputs[0].token_ids) for o in e.outputs(longer, adapter=which)]
    return found


def priorities(e: Engine) -> Any:
    """One slot only: the urgent one, added last, runs before the other that waits."""
    from vllm import SamplingParams

    engine, finished, answers = e.llm.llm_engine, [], {}
    before, e.scheduler.max_num_active_reqs = e.scheduler.max_num_active_reqs, 1
    for name, priority in (("first", 1), ("late", 5), ("urgent", 0)):
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": prompt(name, 70)}, params, priority=priority)
        if name == "first":
            engine.step()
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished.append(output.request_id)
                    answers[output.request_id] = list(output.outputs[0].token_ids)
    finally:
        e.scheduler.max_num_active_reqs = before
    return {"order": finished, "answers": answers}


def embeddings(e: Engine) -> Any:
    """A prompt given as vectors, and its continuation."""
    import torch
    from vllm import SamplingParams

    vectors = torch.randn(140, 64, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    found = []
    for part in (vectors, vectors[:120], vectors):
        (output,) = e.llm.generate([{"prompt_embeds": part}], params, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found


def repetitive(e: Engine) -> Any:
    """Few different tokens: a speculating engine drafts at every step, and is right now and then."""
    prompts = [prompt(f"few{i}", 60 + 23 * i, FEW) for i in range(4)]
    found = [e.tokens(prompts, allowed_token_ids=FEW, max_tokens=90)]
    with e.cut(19):
        found.append(e.tokens([p + a[0] for p, a in zip(prompts, found[0], strict=True)], max_tokens=50))
    found.append(
        e.tokens(prompts, allowed_token_ids=FEW, stop_token_ids=FEW[:1], min_tokens=5, ignore_eos=False)
    )
    return found


# ---- checks of the plugin alone ------------------------------------------------------------------------


def invariance(e: Engine) -> Any:
    """One prompt alone, twice, in company, cut differently, resumed turn by turn, and computed anew."""
    turns = [prompt(f"inv{i}", size) for i, size in enumerate((180, 70, 40))]
    resumed, contexts, cached, context = [], [], [], []
    for turn in turns:
        context = context + turn
        contexts.append(list(context))
        (output,) = e.outputs([context], salt="me", max_tokens=30)
        cached.append(output.num_cached_tokens)
        resumed.append(list(output.outputs[0].token_ids))
        context = context + resumed[-1]
    found = {"resumed": resumed, "cached": cached}
    for name, budget, company in (("anew", 2048, 0), ("again", 2048, 0), ("cut", 29, 0), ("company", 300, 4)):
        e.forget()
        others = [prompt(f"company{i}", 40 + 50 * i) for i in range(company)]
        with e.cut(budget):
            found[name] = [e.tokens([*others, c], max_tokens=30)[-1][0] for c in contexts]
    return found


def _state(e: Engine, name: str) -> str:
    """Where a request stands; vLLM appends to its name."""
    found = [request for key, request in e.scheduler.requests.items() if key.startswith(name)]
    if not found:
        return "finished"
    if found[0].num_output_tokens:
        return "decode"
    return "prefill" if found[0].num_computed_tokens else "queued"


def aborts(e: Engine) -> Any:
    """Abort after every number of steps, with another request beside that must not notice; then once more."""
    from vllm import SamplingParams

    engine, beside = e.llm.llm_engine, prompt("beside", 75)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    start, expected = e.free(), e.tokens([beside], max_tokens=12)[0][0]
    e.forget()
    seen: dict[str, Any] = {"states": [], "wrong": [], "lost": []}
    with e.cut(40):
        for steps in range(16):
            gone, kept = f"gone{steps}", f"kept{steps}"
            for name, tokens in ((gone, prompt("gone", 130)), (kept, beside)):
                engine.add_request(name, {"prompt_token_ids": tokens, "cache_salt": name}, params)
            done: Tokens | None = None
            for step in range(60):
                if step == steps:
                    seen["states"].append(_state(e, gone))
                    engine.abort_request([gone])
                for output in engine.step():
                    if output.request_id == kept and output.finished:
                        done = list(output.outputs[0].token_ids)
                if not engine.has_unfinished_requests():
                    break
            if done != expected:
                seen["wrong"].append([steps, done])
            if e.free() != start:
                seen["lost"].append([steps, start, e.free()])
    return seen


def resets(e: Engine) -> Any:
    """Resetting the cache in the middle of requests, with and without those that run."""
    from vllm import SamplingParams

    prompts = {f"reset{i}": prompt(f"reset{i}", 60 + 70 * i) for i in range(3)}
    expected = dict(zip(prompts, (a[0] for a in e.tokens(list(prompts.values()))), strict=True))
    e.forget()
    engine, done = e.llm.llm_engine, {}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for name, tokens in prompts.items():
        engine.add_request(name, {"prompt_token_ids": tokens}, params)
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        if step in (2, 9):
            engine.reset_prefix_cache(reset_running_requests=step == 9)
    return {"same": done == expected, "steps": step}


def drafts(e: Engine) -> Any:
    """How many tokens were drafted and accepted so far."""
    values = {metric.name: getattr(metric, "value", None) for metric in e.llm.get_metrics()}
    return {name: values[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}


def pages(e: Engine) -> Any:
    """Whether every page is free at the end, and how many conversations had stayed."""
    kept = len(e.scheduler.manager.resident) if e.ours else 0
    free = e.free()
    return {"kept": kept, "lost": e.pool.num_gpu_blocks - 1 - free, "counters": e.scheduler.manager.counters}


CHECKS: dict[str, Callable[[Engine], Any]] = {
    check.__name__: check
    for check in (
        conversation,
        batch,
        cuts,
        one_at_a_time,
        logprobs,
        prompt_logprobs,
        samples,
        beam,
        stops,
        bias,
        processor,
        structured,
        adapters,
        priorities,
        embeddings,
        repetitive,
        invariance,
        aborts,
        resets,
        drafts,
        pages,
    )
}
