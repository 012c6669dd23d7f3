"""Detokenising: the spaces that tokenisation put in go, all others stay."""

import pytest

from maskless.data.detokenize import detokenize


@pytest.mark.parametrize(
    ("tokenised", "text"),
    [
        ("It 's late , isn 't it ?", "It's late, isn't it?"),
        ("They do n't know what we 've seen .", "They don't know what we've seen."),
        ('" I was told , " he said .', '"I was told," he said.'),
        ('He said : " No ! " and " Yes . "', 'He said: "No!" and "Yes."'),
        ("the ' best ' one ; the last", "the 'best' one; the last"),
        ("\u201c Come in , \u201d she said .", "\u201cCome in,\u201d she said."),
        ("profit ( before tax ) rose 5 % to $ 3.2 million .", "profit (before tax) rose 5% to $3.2 million."),
        ("see [ note 3 ] and / or ask .", "see [note 3] and/or ask."),
        ("a well @-@ known 10 @,@ 000", "a well-known 10,000"),
        ("at http : / / example.com now", "at http://example.com now"),
        ("and so on ...", "and so on..."),
        ("the U.S. economy grew 3.5 percent", "the U.S. economy grew 3.5 percent"),
        ("plain words stay as they are", "plain words stay as they are"),
    ],
)
def test_tokenised_text_reads_as_written(tokenised, text):
    assert detokenize(tokenised) == text
    assert detokenize(text) == text
