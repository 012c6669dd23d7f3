"""The API over real connections: answers, streams, what the server says about itself, the figures."""

import base64
import json
import math
import re
import threading

import pytest
import torch

import maskless
from maskless.checkpoint import Model
from maskless.how import How
from maskless.serve.completions import Completion
from maskless.serve.host import Host, Limits
from maskless.serve.requests import CompletionRequest


def test_a_filled_text_is_that_of_the_library(server, models):
    answer = server.post("/v1/fill", {"text": "anna [4] the ___ .", "steps": 3, "seed": 5, "top_p": 0.9})
    assert answer.status == 200
    own = maskless.fill(models["pgm"], "anna [4] the [3] .", steps=3, seed=5, top_p=0.9)
    (text,) = answer.json["texts"]
    assert text["text"] == own
    assert text["tokens"] == own.tokens
    assert text["steps"] == own.steps
    assert all((p is None) == (step < 0) for p, step in zip(text["probabilities"], text["steps"], strict=True))


def test_tokens_with_nulls_are_filled_and_the_others_stay(server):
    first = server.post("/v1/fill", {"text": "anna [4] the ___ .", "seed": 5}).json
    tokens = first["texts"][0]["tokens"]
    body = {"tokens": [None if i % 3 == 1 else t for i, t in enumerate(tokens)], "spaced": [1], "seed": 9}
    second = server.post("/v1/fill", body).json["texts"][0]
    assert [t for i, t in enumerate(second["tokens"]) if i % 3 != 1] == [t for i, t in enumerate(tokens) if i % 3 != 1]
    assert [step >= 0 for step in second["steps"]] == [i % 3 == 1 for i in range(len(tokens))]
    assert second["pieces"][1].startswith(" ")


def test_generated_texts_and_the_model_by_name(server, models):
    body = {"prompt": "anna has", "length": 16, "n": 3, "steps": 4, "seed": 1, "model": "mdlm"}
    answer = server.post("/v1/generate", body).json
    own = maskless.generate(models["mdlm"], 3, prompt="anna has", length=16, steps=4, seed=1)
    assert [text["text"] for text in answer["texts"]] == own
    assert answer["model"] == "mdlm"


@pytest.mark.parametrize("how", [({"stream": True}, {}), ({}, {"accept": "text/event-stream"})])
def test_a_stream_tells_each_step_and_then_the_whole(server, how):
    more, headers = how
    body = {"text": "anna [4] the ___ .", "steps": 3, "seed": 5, "n": 2}
    whole = server.post("/v1/fill", body).json
    answer = server.post("/v1/fill", body | more, **headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    (first, opening), *steps, (last, done) = answer.events
    assert (first, last) == ("start", "done")
    assert opening["unknown"] == 7
    assert opening["texts"] == 2
    tokens = [list(opening["tokens"]) for _ in range(2)]
    seen = 0
    for number, (name, step) in enumerate(steps):
        assert (name, step["step"]) == ("step", number)
        for one in step["sampled"]:
            assert tokens[one["row"]][one["position"]] is None
            tokens[one["row"]][one["position"]] = one["token"]
            assert 0 < one["probability"] <= 1
            seen += 1
    assert seen == 14
    assert tokens == [text["tokens"] for text in done["texts"]] == [text["tokens"] for text in whole["texts"]]


def test_each_token_is_told_with_the_step_of_its_own_text(server):
    """Counts are drawn for each text, and may be 0: then texts are at different steps at the same time."""
    body = {"text": "anna [9] the ___ .", "steps": 9, "seed": 2, "n": 5, "counts": "mdlm", "stream": True}
    _, *steps, (_, done) = server.post("/v1/fill", body).events
    told = {(one["row"], one["position"]): step["step"] for _, step in steps for one in step["sampled"]}
    came = {
        (row, i): step for row, text in enumerate(done["texts"]) for i, step in enumerate(text["steps"]) if step >= 0
    }
    assert told == came


def test_revisions_are_those_of_the_library_and_of_the_stream(server, models):
    body = {"text": "anna [16] the ___ .", "steps": 8, "seed": 2, "revise": 3}
    whole = server.post("/v1/fill", body).json
    own = maskless.fill(models["pgm"], "anna [16] the [3] .", steps=8, seed=2, revise=3)
    assert whole["texts"][0]["tokens"] == own.tokens
    assert whole["texts"][0]["steps"] == own.steps
    (_, opening), *steps, (_, done) = server.post("/v1/fill", body | {"stream": True}).events
    assert opening["steps"] == whole["steps"] == len(steps) == 8 + 1 + 1 + 1
    assert whole["revision_steps"] == 3
    assert [step["step"] for _, step in steps] == list(range(len(steps)))
    last = {one["position"]: (step["step"], one) for _, step in steps for one in step["sampled"]}
    (text,) = done["texts"]
    assert text == whole["texts"][0]
    for i, (step, one) in last.items():
        assert (step, one["token"]) == (text["steps"][i], text["tokens"][i])
        assert one["probability"] == text["probabilities"][i]
    assert sum(len(step["sampled"]) for _, step in steps) > len(last) == 19


def test_alternatives_are_probabilities_that_fall(server):
    text = server.post("/v1/fill", {"text": "anna [4] the ___ .", "seed": 5}).json["texts"][0]
    body = {"tokens": text["tokens"], "position": 2, "k": 100}
    answer = server.post("/v1/alternatives", body).json
    chances = [one["probability"] for one in answer["alternatives"]]
    assert len(chances) == 100
    assert chances == sorted(chances, reverse=True)
    assert 0 < sum(chances) <= 1.001
    hidden = [*text["tokens"][:2], None, *text["tokens"][3:]]
    assert server.post("/v1/alternatives", body | {"tokens": hidden}).json == answer  # the token itself is not used


def test_completions_are_openais(server):
    body = {"prompt": "anna has [2] ", "suffix": " ball .", "max_tokens": 5, "n": 2, "seed": 3}
    answer = server.post("/v1/completions", body).json
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 10
    echoed = server.post("/v1/completions", body | {"echo": True}).json["choices"]
    assert all(choice["text"].startswith("anna has [2] ") for choice in echoed)
    assert [c["text"].removeprefix("anna has [2] ") for c in echoed] == [c["text"] for c in answer["choices"]]
    (slash,) = server.post("/v1/completions", {"prompt": "C:\\", "max_tokens": 4, "echo": True}).json["choices"]
    assert slash["text"].startswith("C:\\")


def streamed(server, body: dict) -> list[dict]:
    """The chunks of a completion, the end of the stream aside."""
    events = server.post("/v1/completions", body | {"stream": True}).body.decode().removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(one.removeprefix("data: ")) for one in events[:-1]]


def test_a_completion_takes_several_prompts_and_tokens(server):
    body = {"model": "pgm", "max_tokens": 5, "n": 2, "seed": 3, "order": "left"}
    alone = [server.post("/v1/completions", body | {"prompt": one}).json for one in ("anna has", "the ball of eva")]
    both = server.post("/v1/completions", body | {"prompt": ["anna has", "the ball of eva"]}).json
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in both["choices"]] == [c["text"] for one in alone for c in one["choices"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert both["usage"][name] == sum(one["usage"][name] for one in alone)
    filled = server.post("/v1/fill", {"text": "anna has[1]", "model": "pgm"}).json["texts"][0]
    ids = [token for token, step in zip(filled["tokens"], filled["steps"], strict=True) if step < 0]
    for prompt in (ids, [ids]):
        given = server.post("/v1/completions", body | {"prompt": prompt, "echo": True}).json
        assert [c["text"] for c in given["choices"]] == [f"anna has{c['text']}" for c in alone[0]["choices"]]
        assert given["usage"] == alone[0]["usage"]
    whole = {choice["index"]: choice["text"] for choice in both["choices"]}
    for chunk in streamed(server, body | {"prompt": ["anna has", "the ball of eva"]}):
        (choice,) = chunk["choices"]
        assert whole[choice["index"]].startswith(choice["text"])
        whole[choice["index"]] = whole[choice["index"]].removeprefix(choice["text"])
    assert {*whole.values()} == {""}


def test_a_stream_tells_what_was_used_if_it_is_asked(server):
    body = {"prompt": "anna", "max_tokens": 5, "seed": 1}
    *chunks, last = streamed(server, body | {"stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]) == ([], server.post("/v1/completions", body).json["usage"])
    assert chunks
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all("usage" not in chunk for chunk in streamed(server, body))


def test_what_clients_leave_open_may_be_null_or_empty(server):
    body = {"model": "pgm", "prompt": "anna", "max_tokens": 4}
    said = {"logit_bias": {}, "frequency_penalty": 0.0, "presence_penalty": 0, "best_of": 1, "n": 1, "top_p": 1}
    said |= dict.fromkeys(("echo", "logprobs", "stop", "stream", "stream_options", "suffix", "user", "temperature"))
    plain, full = (server.post("/v1/completions", one).json for one in (body, body | said))
    assert plain["choices"] == full["choices"]


def test_log_probabilities_are_those_of_each_token(server):
    body = {"prompt": "anna", "max_tokens": 6, "seed": 2, "logprobs": 1}
    (choice,) = server.post("/v1/completions", body).json["choices"]
    found = choice["logprobs"]
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(6)]
    assert found["top_logprobs"] == [{t: p} for t, p in zip(found["tokens"], found["token_logprobs"], strict=True)]
    filled = server.post("/v1/fill", {"text": "anna[6]", "seed": 2}).json["texts"][0]
    decided = [pair for pair in zip(filled["pieces"], filled["probabilities"], strict=True) if pair[1] is not None]
    assert found["tokens"] == [piece for piece, _ in decided]
    assert [math.exp(p) for p in found["token_logprobs"]] == pytest.approx([p for _, p in decided], rel=1e-3)
    (last,) = (chunk["choices"][0] for chunk in streamed(server, body))
    assert last["logprobs"] == found
    assert server.post("/v1/completions", body | {"logprobs": 0}).json["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_model_is_found_by_its_name_and_an_unknown_one_is_404(server):
    listed = {one["id"]: one for one in server.get("/v1/models").json["data"]}
    assert {"id", "object", "created", "owned_by"} <= listed["pgm"].keys()
    assert server.get("/v1/models/pgm").json == listed["pgm"]
    for answer in (server.get("/v1/models/gpt"), server.post("/v1/completions", {"model": "gpt", "prompt": "a"})):
        assert answer.status == 404
        assert "'gpt': expected one of pgm" in answer.json["error"]["message"]


def test_an_end_is_not_counted_as_text(models):
    """What a completion has behind it is not either, nor what leads every sequence."""
    model = Model(models["pgm"].network, models["pgm"].codec, "padded")
    host = Host("stories", model, Limits())
    completion = Completion(host, CompletionRequest(prompt="anna has", max_tokens=4))
    drafts, gap, eos = completion.drafts(How()), completion.gaps[0], model.codec.eos
    drafts.tokens[0, gap] = torch.tensor([5, 6, eos, 7])
    given = len(model.codec.encode("anna has"))
    usage = {"prompt_tokens": given, "completion_tokens": 2, "total_tokens": given + 2}
    assert completion.answer(drafts)["usage"] == usage
    host.batcher.close()


def test_a_completion_without_a_seed_is_that_of_seed_0(server):
    body = {"prompt": "anna", "max_tokens": 6}
    unsaid, null, zero = (
        server.post("/v1/completions", body | more).json for more in ({}, {"seed": None}, {"seed": 0})
    )
    assert unsaid["choices"] == null["choices"] == zero["choices"]
    assert server.post("/v1/completions", body | {"seed": 1}).json["choices"] != zero["choices"]


@pytest.mark.parametrize("order", ["random", "left", "strands", "confidence"])
@pytest.mark.parametrize("stop", [None, "a", ["e", " "]])
def test_a_streamed_completion_is_the_whole_one(server, order, stop):
    for seed in (0, 2):
        body = {"prompt": "anna", "max_tokens": 12, "order": order, "steps": 12, "stop": stop, "seed": seed}
        body["revise"] = 0 if order == "confidence" else seed
        whole = server.post("/v1/completions", body).json["choices"][0]
        parts = [chunk["choices"][0] for chunk in streamed(server, body)]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert parts[-1]["finish_reason"] == whole["finish_reason"]
        if stop:
            assert not any(one in whole["text"] for one in stop)


def test_requests_that_arrive_together_share_steps_and_change_nothing(server):
    bodies = [
        {"text": f"anna [{3 + i % 5}] the [2] .", "steps": 1 + i % 7, "seed": i, "temperature": 0.5 + i / 40}
        for i in range(24)
    ]
    alone = [server.post("/v1/fill", body).json["texts"] for body in bodies]
    before = server.hosts["pgm"].batcher.counts.steps
    together = [None] * len(bodies)

    def ask(i):
        together[i] = server.post("/v1/fill", bodies[i]).json["texts"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = server.hosts["pgm"].batcher.counts.steps - before
    assert steps < sum(min(body["steps"], 5 + i % 5) for i, body in enumerate(bodies))
    for one, other in zip(alone, together, strict=True):
        assert one[0]["tokens"] == other[0]["tokens"]
        assert one[0]["steps"] == other[0]["steps"]


def test_pictures_are_drawn_filled_and_streamed(server, models):
    drawn = server.post("/v1/pictures", {"label": "dog", "guidance": 2.0, "seed": 4, "steps": 5}).json
    (own,) = maskless.generate(models["pictures"], labels=["dog"], guidance=2.0, seed=4, steps=5)
    assert drawn["label"] == "dog"
    assert base64.b64decode(drawn["image"]).startswith(b"\x89PNG")
    assert drawn["tokens"] == own.tokens.tolist()
    holes = [[None if x > 1 else token for x, token in enumerate(line)] for line in drawn["tokens"]]
    body = {"tokens": holes, "label": 1, "seed": 8, "steps": 4, "frames": True, "stream": True}
    (_, opening), *steps, (_, done) = server.post("/v1/pictures/fill", body).events
    assert opening["known"] == [[x <= 1 for x in range(4)]] * 4
    assert sum(len(step["sampled"]) for _, step in steps) == 8
    assert all(base64.b64decode(step["image"]).startswith(b"\x89PNG") for _, step in steps)
    assert [line[:2] for line in done["tokens"]] == [line[:2] for line in drawn["tokens"]]
    mask = [[False, False, True, True]] * 4
    sent = server.post("/v1/pictures/fill", {"image": drawn["image"], "mask": mask, "label": 1, "seed": 8, "steps": 4})
    assert sent.json["tokens"] == done["tokens"]


def test_the_page_needs_nothing_from_elsewhere(server):
    names = ["/", "/docs", *(f"/page/{name}" for name in ("app.js", "api.js", "style.css", "pictures.js", "write.js"))]
    for name in names:
        answer = server.get(name)
        assert answer.status == 200
        assert re.findall(rb"(?:src|href|url\(|from |import )\W*(?:https?:)?//", answer.body) == []


def test_a_stream_says_which_strand_a_position_is_in(chained):
    body = {"text": "anna [6] the ___ .", "strands": 3, "stream": True}
    opening = chained.post("/v1/fill", body).events[0][1]
    gaps = [i for i, token in enumerate(opening["tokens"]) if token is None]
    assert [opening["strands"][i] for i in gaps] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {opening["strands"][i] for i in range(len(opening["tokens"])) if i not in gaps} == {-1}
    assert chained.post("/v1/fill", body | {"strands": None, "order": "random"}).events[0][1]["strands"] is None


def test_a_stream_of_exact_rounds_has_what_was_rejected(chained):
    body = {"text": "anna [20] .", "exact": True, "draft": 8, "order": "random", "stream": True}
    (_, opening), *steps, (_, done) = chained.post("/v1/fill", body).events
    assert opening["draft"] == 8
    (text,) = done["texts"]
    drafted = [len(step["sampled"]) + len(step["rejected"]) for _, step in steps]
    assert len(steps) < 20 < sum(drafted)  # several tokens in a round, and some that did not stand
    for _, step in steps:
        for one in step["rejected"]:
            came = text["steps"][one["position"]]
            assert came > step["step"] or text["tokens"][one["position"]] != one["token"]
    assert all(
        "rejected" not in step for _, step in chained.post("/v1/fill", body | {"exact": False, "draft": None}).events
    )


def test_a_model_says_how_good_it_is_and_with_what(chained):
    chain, mdlm, causal = chained.get("/v1/models").json["data"]
    assert (chain["quality"], chain["defaults"]) == ("Gen-PPL 4.6", {"strands": 4})
    assert (chain["exact"], mdlm["exact"], causal["exact"]) == (True, False, False)
    assert (causal["quality"], causal["defaults"]) == (None, {})
    assert (chain["order"], mdlm["order"], causal["order"]) == ("strands", "random", "left")


def test_health_models_and_the_schema(server):
    assert server.get("/healthz").json["models"] == ["pgm", "mdlm", "pictures"]
    pgm, mdlm, pictures = server.get("/v1/models").json["data"]
    assert (pgm["kind"], mdlm["kind"]) == ("PGM", "MDLM")
    assert pgm["max_length"] == 48
    assert pictures["classes"] == ["cat", "dog", "ship"]
    schema = server.get("/openapi.json").json
    assert "/v1/fill" in schema["paths"]
    assert "HTTPValidationError" not in json.dumps(schema["paths"])


def test_figures_for_prometheus(server):
    server.post("/v1/fill", {"text": "a [3]"})
    server.get("/nothing/at/all")
    text = server.get("/metrics").body.decode()
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \S+ .+|maskless_\w+(\{(\w+="[^"]*",?)+\})? [0-9.e+-]+', line), line
    assert re.search(r'maskless_requests_total\{path="/v1/fill",status="200"\} [1-9]', text)
    assert re.search(r'maskless_requests_total\{path="other",status="404"\} [1-9]', text)
    assert re.search(r'maskless_tokens_total\{model="pgm"\} [1-9]', text)
    assert 'le="+Inf"' in text
