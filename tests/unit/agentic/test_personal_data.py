"""Personal data in texts: what becomes of it by hand, and what Presidio finds where it is installed."""

import hashlib
import re

import pytest

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle_agentic.preprocessor import PIIPresidioFilter
from twinkle_agentic.preprocessor.pii_presidio_filter import Found, Strategy, apart
from twinkle_agentic.preprocessor.pii_recognizers import is_chinese_id, is_luhn

MAIL = re.compile(r"\w+@\w+\.\w+")


def mails(text, language):
    return [Found("EMAIL_ADDRESS", found.start(), found.end(), 0.9) for found in MAIL.finditer(text)]


def row(*texts):
    return {"messages": [{"role": "user", "content": text} for text in texts], "id": 1}


def changed(text, strategy, **settings):
    return PIIPresidioFilter(entity_strategy={"EMAIL_ADDRESS": strategy}, finder=mails, **settings).without(text)


def test_a_place_is_masked_removed_or_hashed():
    assert changed("to ann@x.org, now", "mask") == "to ***@*.***, now"
    assert changed("to ann@x.org, now", Strategy.REDACT) == "to , now"
    digest = hashlib.sha256(b"salt\0ann@x.org").hexdigest()[:16]
    assert changed("to ann@x.org, now", "hash", hash_salt="salt") == f"to {digest}, now"
    assert changed("to ann@x.org", "mask", score_threshold=0.95) == "to ann@x.org"


def test_the_same_text_becomes_the_same_other_one_as_far_as_is_asked():
    def others(**settings):
        one = PIIPresidioFilter(finder=mails, **settings)
        made = one.apply([row("ann@x.org and ann@x.org", "ann@x.org"), row("ann@x.org and bob@x.org")])
        return [MAIL.findall(message["content"].replace(".", "_", 0)) for r in made for message in r["messages"]]

    (first, second), (third,), (fourth, other) = others()
    assert first == second == third != fourth and other != fourth and "ann@x.org" not in (first, fourth)
    (first, _), _, (fourth, _) = others(persistent_consistency=True)
    assert first == fourth
    (first, second), _, _ = others(consistency=False)
    assert first != second
    assert others() == others() != others(hash_salt="other")


def test_texts_and_thoughts_of_the_roles_are_read_and_counted():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "ann@x.org"}, {"type": "image"}]},
        {"role": "assistant", "content": "hi", "reasoning_content": "bob@x.org, ann@x.org"},
        {"role": "tool", "content": "tom@x.org"},
    ]
    one = PIIPresidioFilter(entity_strategy={"EMAIL_ADDRESS": "redact"}, record_counts=True, finder=mails)
    columns = one({"messages": [messages]})
    (changed_messages,) = columns["messages"]
    assert changed_messages[0]["content"] == [{"type": "text", "text": ""}, {"type": "image"}]
    assert changed_messages[1] == {"role": "assistant", "content": "hi", "reasoning_content": ", "}
    assert changed_messages[2] == messages[2] and columns["pii_counts"] == [{"EMAIL_ADDRESS": 3}]


def test_of_places_that_overlap_the_surest_stays_then_the_longest():
    a, b, c = Found("A", 0, 5, 0.5), Found("B", 3, 9, 0.9), Found("C", 3, 8, 0.9)
    assert apart([a, b, c, Found("D", 9, 10, 0.1)]) == [b, Found("D", 9, 10, 0.1)]


def test_check_digits_are_those_of_the_standards():
    # The published example of GB 11643, and of Luhn's formula.
    assert is_chinese_id("11010519491231002X") and not is_chinese_id("110105194912310021")
    assert is_luhn("79927398713") and not is_luhn("79927398714")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"languages": ["fr"]}, "languages"),
        ({"score_threshold": 2.0}, "score_threshold"),
        ({"default_strategy": "burn"}, "strategy"),
        ({"entity_strategy": {"SHOE_SIZE": "mask"}}, "entity_strategy"),
        ({"entity_strategy": {"PERSON": "replace"}}, "spacy_models"),
    ],
)
def test_wrong_settings_are_refused_by_their_name(settings, field):
    with pytest.raises(InvalidInput) as refused:
        PIIPresidioFilter(**settings)
    assert refused.value.field == field


@pytest.mark.parametrize("package", ["presidio_analyzer", "faker"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=r"twinkle-queue\[pii\]"):
        PIIPresidioFilter(finder=mails if package == "faker" else None)


@pytest.mark.soak
def test_presidio_finds_mail_and_numbers_and_leaves_the_rest():
    pytest.importorskip("presidio_analyzer", reason="Presidio brings 400 MB: pip install 'twinkle-queue[pii]'")
    one = PIIPresidioFilter(entity_strategy={"EMAIL_ADDRESS": "mask"}, record_counts=True)
    english = "Mail ann.lee@example.com or call 212-555-0199; card 4111 1111 1111 1111, host 192.168.1.7, in 1804."
    chinese = "邮箱是 ann@example.com，电话是13812345678，身份证号码是11010519491231002X，一共有12345个。"
    made = one.apply([row(english), row(chinese)])
    assert [r["messages"][0]["content"] for r in made] == [
        "Mail ***.***@*******.*** or call ***-***-****; card **** **** **** ****, host ***.***.*.*, in 1804.",
        "邮箱是 ***@*******.***，电话是***********，身份证号码是******************，一共有12345个。",
    ]
    assert made[1]["pii_counts"] == {"EMAIL_ADDRESS": 1, "CN_PHONE": 1, "CN_ID": 1}
