"""Stories are exact samples of the model in a llama2.c file: the same logits as transformers, and the right draws."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import stories

WIDTH, HIDDEN, LAYERS, HEADS, VOCAB, LENGTH = 32, 48, 2, 2, 400, 24
SHAPES = {"embedding": (VOCAB, WIDTH), "norm1": (LAYERS, WIDTH)}
SHAPES |= dict.fromkeys(("q", "k", "v", "out"), (LAYERS, WIDTH, WIDTH)) | {"norm2": (LAYERS, WIDTH)}
SHAPES |= {"gate": (LAYERS, HIDDEN, WIDTH), "down": (LAYERS, WIDTH, HIDDEN), "up": (LAYERS, HIDDEN, WIDTH)}
SHAPES |= {"norm": (WIDTH,), "rotations": (LENGTH, WIDTH // HEADS)}

NAMES = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}  # of transformers, in each layer
NAMES |= {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj"}
NAMES |= {"gate": "mlp.gate_proj", "down": "mlp.down_proj", "up": "mlp.up_proj"}


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """Random ones, of a model that hardly ever writes a lone byte and soon ends its texts."""
    rng = np.random.default_rng(0)
    made = {name: 0.3 * rng.standard_normal(shape) for name, shape in SHAPES.items()}
    for name in ("norm1", "norm2", "norm"):
        made[name] += 1
    made["embedding"][:, 0] = 3
    made["embedding"][: stories.FIRST_PIECE, 0] = -3
    made["embedding"][[stories.BEGIN, stories.END], 0] = 4
    return {name: value.astype("<f4") for name, value in made.items()}


@pytest.fixture(scope="module")
def file(weights, tmp_path_factory) -> Path:
    """A model with its tokenizer, as llama2.c writes them."""
    head = struct.pack("<7i", WIDTH, HIDDEN, LAYERS, HEADS, HEADS, VOCAB, LENGTH)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    words = ["<unk>", "\n<s>\n", "\n</s>\n", *bytes_, *(f" wörd{i}" for i in range(VOCAB - stories.FIRST_PIECE))]
    pieces = [struct.pack("<fi", 0.0, len(word.encode())) + word.encode() for word in words]
    path = tmp_path_factory.mktemp("model") / "llama2.data"
    path.write_bytes(b"".join([head, *(w.tobytes() for w in weights.values()), struct.pack("<i", 9), *pieces]))
    return path


@pytest.fixture(scope="module")
def model(file):
    sizes, weights, _ = stories.read(file)
    return stories.Llama(sizes, weights, torch.device("cpu"), torch.float32)


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        cache = model.cache(len(ids))
        return torch.stack([model.step(ids[:, n], n, cache) for n in range(ids.shape[1])], 1)


def test_a_file_gives_its_weights_and_tokens(file, weights):
    sizes, read, pieces = stories.read(file)
    assert (sizes.width, sizes.heads, sizes.vocab, sizes.length) == (WIDTH, HEADS, VOCAB, LENGTH)
    assert all(np.array_equal(read[name], value) for name, value in weights.items())
    assert pieces[:4] == [b"", b"", b"", b"\x00"]
    assert pieces[258:260] == [b"\xff", " wörd0".encode()]
    assert len(pieces) == VOCAB


@pytest.mark.parametrize(("keep", "what"), [(20, "20 bytes"), (9000, "ends within the weights"), (-5, "399 of 400")])
def test_a_damaged_file_is_one_clear_line(file, tmp_path, keep, what, capsys):
    damaged = tmp_path / "damaged.data"
    damaged.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SystemExit) as ended:
        stories.main([str(damaged), "--out", str(tmp_path / "out.jsonl")])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert what in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_logits_are_those_of_transformers(model, weights):
    """With the same weights; transformers turns the halves of a head where llama2.c turns neighbouring pairs."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)

    def halves(w: np.ndarray) -> np.ndarray:
        return w.reshape(HEADS, WIDTH // HEADS // 2, 2, WIDTH).swapaxes(1, 2).reshape(WIDTH, WIDTH)

    state = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    for i in range(LAYERS):
        layer = {name: value[i] for name, value in weights.items() if name not in ("embedding", "norm")}
        layer |= {"q": halves(layer["q"]), "k": halves(layer["k"])}
        state |= {f"model.layers.{i}.{theirs}.weight": layer[ours] for ours, theirs in NAMES.items()}
    network = transformers.LlamaForCausalLM(config).eval()
    found = network.load_state_dict({name: torch.from_numpy(w.copy()) for name, w in state.items()}, strict=False)
    assert found.missing_keys in ([], ["lm_head.weight"])  # tied
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(logits(model, ids), network(ids).logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_draw_is_the_token_whose_share_it_falls_in(temperature):
    """At the middle of each token's share of the line from 0 to 1 it is that token, and at the ends the outer ones."""
    scores = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    scores[0, [0, 130, VOCAB - 1]] = -torch.inf
    p = (scores / temperature).softmax(-1)[0].double()
    middle = (p.cumsum(0) - p / 2) / p.sum()
    possible = p.nonzero()[:, 0]
    u = torch.cat([middle[possible], torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)])
    drawn = stories.draw(scores.expand(len(u), -1), u, temperature)
    assert drawn.tolist() == [*possible.tolist(), 1, VOCAB - 2]


def test_samples_follow_the_model(model):
    """Each token is the draw from what the model says after those before it."""
    u = stories.uniform(3, 4, LENGTH, 5)
    drawn = torch.from_numpy(stories.sample(model, model.cache(5), u, 1.0)).long()
    said = logits(model, torch.cat([torch.full((5, 1), stories.BEGIN), drawn[:, :-1]], 1))
    assert torch.equal(drawn, torch.stack([stories.draw(said[:, n], u[n], 1.0) for n in range(LENGTH)], 1))


def test_only_stories_that_end_are_kept():
    pieces = [b"", b"", b"", *(bytes([i]) for i in range(256)), b" one", b" two"]
    snow = [3 + byte for byte in "é".encode()]
    rows = [
        [259, 260, 1, 259, 259, 259],  # ends, and what follows is another story
        [260, *snow, 2, 1, 1],
        [259, 259, 259, 259, 259, 259],  # never ends
        [259, snow[0], 1, 1, 1, 1],  # half a letter
        [259, 0, 1, 1, 1, 1],  # a token without a text
        [1, 259, 259, 259, 259, 1],  # nothing
    ]
    assert list(stories.texts(np.array(rows), pieces)) == ["one two", "twoé"]


def test_a_seed_gives_the_same_different_stories_again(file, tmp_path, capsys):
    made = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        out = tmp_path / f"{name}.jsonl"
        stories.main([str(file), "--out", str(out), "--stories", "40", "--seed", str(seed), "--batch", "16"])
        made.append([json.loads(line)["text"] for line in out.read_text().splitlines()])
    assert made[0] == made[1] != made[2]
    assert all(len(set(texts)) == len(texts) == 40 for texts in made)
    assert all(text.startswith("wörd") for text in made[0])
    about = json.loads((tmp_path / "c.about.json").read_text())
    assert about["licence"] == "MIT"
    assert (about["seed"], about["temperature"], about["stories"]) == (1, 1.0, 40)
    assert "language model" in about["what"]
    assert "40 of 40 stories" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_cuda_the_model_says_the_same(file, model):
    sizes, weights, _ = stories.read(file)
    other = stories.Llama(sizes, weights, torch.device("cuda"), torch.bfloat16)
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    p = logits(model, ids).log_softmax(-1)
    q = logits(other, ids.cuda()).log_softmax(-1).cpu()
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.01
