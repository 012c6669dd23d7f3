"""The toy language: the checker accepts what the generator writes, and nothing else."""

from maskless.data.toy import check, corpus, write


def test_a_seed_gives_the_same_corpus_again(tmp_path):
    assert list(corpus(50, seed=3)) == list(corpus(50, seed=3)) != list(corpus(50, seed=4))
    assert write(tmp_path / "toy.jsonl", 1, seed=3).read_text() == f'{{"text": "{next(corpus(1, seed=3))}"}}\n'


def test_sentences_are_right_of_one_length_and_tolerate_no_wrong_word():
    sentences = list(corpus(200, 0))
    assert all(check(one) and len(one.split()) == 37 for one in sentences)
    words = sorted({word for one in sentences for word in one.split()})
    right = sentences[0].split()
    for i in range(len(right)):
        for word in words:
            assert check(" ".join([*right[:i], word, *right[i + 1 :]])) == (word == right[i])
    assert not any(check(text) for text in ("", ".", sentences[0].removesuffix(" ."), f" {sentences[0]}"))
