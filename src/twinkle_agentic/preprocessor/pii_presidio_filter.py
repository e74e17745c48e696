"""Personal data in texts: what Presidio finds of it is masked, replaced, removed or hashed."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle_agentic.preprocessor.base import QualityFilter, Row, messages_of
from twinkle_agentic.preprocessor.pii_recognizers import INSTALL, Finder, Found, presidio_finder

EAST_ASIAN = re.compile(r"[\u3400-\u9fff]")
EAST_ASIAN_SHARE = 0.15
"""Of a text's characters from which on it is read as Chinese."""
LOCALES = {"en": "en_US", "zh": "zh_CN"}
FAKES = {
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone_number",
    "CN_PHONE": "phone_number",
    "CN_LANDLINE": "phone_number",
    "IP_ADDRESS": "ipv4",
    "URL": "url",
    "IBAN_CODE": "iban",
    "CREDIT_CARD": "credit_card_number",
    "CN_BANK": "credit_card_number",
    "US_SSN": "ssn",
    "PERSON": "name",
    "LOCATION": "city",
    "ORGANIZATION": "company",
    "DATE_TIME": "date",
}
"""The method of ``faker`` that makes another of its kind; what has none becomes its entity's name in brackets."""


class Strategy(StrEnum):
    """What becomes of a place: stars for its letters and digits, another of its kind, nothing, or a digest of it."""

    MASK = "mask"
    REPLACE = "replace"
    REDACT = "redact"
    HASH = "hash"

    @classmethod
    def coerce(cls, value: str | Strategy) -> Strategy:
        """Itself, or that of a name.

        Raises:
            InvalidInput: There is none of this name.
        """
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(strategy.value for strategy in cls)
            raise InvalidInput("strategy", f"is {value!r}; send one of {known}") from None


@dataclass
class _Place:
    """Which row a text is of, and what was found in it so far."""

    number: int
    counts: Counter[str]


class PIIPresidioFilter(QualityFilter):
    """Changes personal data in messages' texts and thoughts, and drops nothing; what tools are called with stays.

    Looked for are addresses of mail and of hosts, telephone, card, bank and identity numbers: what a pattern and a
    check digit can tell. Names and places need a language model to tell, and are looked for only with ``spacy_models``
    and a strategy for them (``PERSON``, ``LOCATION``). Nothing is fetched from a network.

    Args:
        languages: ``en`` and ``zh``; a text with a share of Chinese letters is read as Chinese.
        spacy_models: The installed spaCy model of a language; without, its texts are only cut into words.
        entity_strategy: What becomes of each kind of place (:class:`Strategy`), above ours: mail is replaced, all else
            masked. A kind that ours leave out is looked for as well.
        default_strategy: Of kinds that have none.
        score_threshold: Of how sure a place must be, 0 to 1.
        roles: Whose messages are read.
        consistency: The same text becomes the same other one throughout a row.
        persistent_consistency: And throughout all rows.
        hash_salt: Goes into digests and choices, so that nobody can try out what they stand for.
        record_counts: Note in ``pii_counts`` how many of each kind a row had.
        finder: In place of Presidio: tells the places of a text in a language.

    Raises:
        ConfigError: ``presidio-analyzer`` or ``faker`` is not installed; names the extra.
        InvalidInput: A setting is wrong; names it.
    """

    def __init__(
        self,
        languages: Sequence[str] = ("en", "zh"),
        spacy_models: Mapping[str, str] | None = None,
        entity_strategy: Mapping[str, str | Strategy] | None = None,
        default_strategy: str | Strategy = Strategy.MASK,
        score_threshold: float = 0.5,
        roles: Sequence[str] = ("user", "assistant", "system"),
        consistency: bool = True,
        persistent_consistency: bool = False,
        hash_salt: str = "",
        record_counts: bool = False,
        *,
        finder: Finder | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= score_threshold <= 1:
            raise InvalidInput("score_threshold", f"is {score_threshold}; send 0 to 1")
        unknown = [language for language in languages if language not in LOCALES]
        if unknown or not languages:
            raise InvalidInput("languages", f"are {list(languages)}; send some of {', '.join(LOCALES)}")
        self._languages = tuple(languages)
        self._strategies = {"EMAIL_ADDRESS": Strategy.REPLACE}
        self._strategies |= {name: Strategy.coerce(value) for name, value in (entity_strategy or {}).items()}
        self._default = Strategy.coerce(default_strategy)
        self._threshold = score_threshold
        self._roles = frozenset(roles)
        self._consistent = (consistency, persistent_consistency)
        self._salt = hash_salt
        self._records = record_counts
        if record_counts:
            self.adds = ("pii_counts",)
        self._rows = 0
        self._find = finder or presidio_finder(self._languages, spacy_models or {}, frozenset(self._strategies))
        self._fakers = {language: _faker(LOCALES[language]) for language in self._languages}

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        self._rows += 1
        place = _Place(self._rows, Counter())
        messages = [
            self._changed(message, place) if message.get("role") in self._roles else message
            for message in messages_of(row)
        ]
        return {**row, "messages": messages, **({"pii_counts": dict(place.counts)} if self._records else {})}

    def _changed(self, message: Mapping[str, Any], place: _Place) -> dict[str, Any]:
        changed = dict(message)
        for field in ("content", "reasoning_content"):
            value = message.get(field)
            if isinstance(value, str):
                changed[field] = self.without(value, place)
            elif isinstance(value, list):
                changed[field] = [
                    {**part, "text": self.without(part["text"], place)}
                    if isinstance(part, Mapping) and isinstance(part.get("text"), str)
                    else part
                    for part in value
                ]
        return changed

    def without(self, text: str, place: _Place | None = None) -> str:
        """The text without personal data."""
        place = place or _Place(0, Counter())
        share = len(EAST_ASIAN.findall(text)) / max(1, len(text))
        is_chinese = "zh" in self._languages and share >= EAST_ASIAN_SHARE
        language = "zh" if is_chinese else next((one for one in self._languages if one != "zh"), "zh")
        kept, last = [], 0
        for found in apart(one for one in self._find(text, language) if one.score >= self._threshold):
            original = text[found.start : found.end]
            place.counts[found.entity] += 1
            kept += [text[last : found.start], self._other(found.entity, original, language, place)]
            last = found.end
        return "".join([*kept, text[last:]])

    def _other(self, entity: str, original: str, language: str, place: _Place) -> str:
        strategy = self._strategies.get(entity, self._default)
        if strategy is Strategy.REDACT:
            return ""
        if strategy is Strategy.MASK:
            return "".join("*" if character.isalnum() else character for character in original)
        if strategy is Strategy.HASH:
            return hashlib.sha256(f"{self._salt}\0{original}".encode()).hexdigest()[:16]
        method = FAKES.get(entity)
        if method is None:
            return f"<{entity}>"
        within_row, within_all = self._consistent
        scope = "" if within_all else f"{place.number}" if within_row else f"{place.number} {place.counts.total()}"
        digest = hashlib.sha256(f"{self._salt}\0{scope}\0{entity}\0{original}".encode()).digest()
        faker = self._fakers[language]
        faker.seed_instance(random.Random(digest).getrandbits(64))
        return str(getattr(faker, method)())


def apart(found: Any) -> list[Found]:
    """Of places that overlap the surest, of equally sure ones the longest; in the order of the text."""
    chosen: list[Found] = []
    for one in sorted(found, key=lambda place: (-place.score, place.start - place.end, place.start)):
        if all(one.end <= other.start or other.end <= one.start for other in chosen):
            chosen.append(one)
    return sorted(chosen, key=lambda place: place.start)


def _faker(locale: str) -> Any:
    try:
        # An extra: only this filter makes things up.
        import faker  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigError(f"personal data is replaced by the package faker: {INSTALL}") from None
    return faker.Faker(locale)
