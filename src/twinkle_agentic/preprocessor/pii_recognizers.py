"""Where personal data stands in a text, by Presidio's patterns and a few for China."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.core.errors import ConfigError, InvalidInput

INSTALL = "pip install 'twinkle-queue[pii]'"
OF_PRESIDIO = {
    "PHONE_NUMBER": "PhoneRecognizer",
    "IP_ADDRESS": "IpRecognizer",
    "CREDIT_CARD": "CreditCardRecognizer",
    "IBAN_CODE": "IbanRecognizer",
    "CRYPTO": "CryptoRecognizer",
    "US_SSN": "UsSsnRecognizer",
    "US_ITIN": "UsItinRecognizer",
}
"""What is looked for in any case, besides mail."""
ON_DEMAND = {
    "US_BANK_NUMBER": "UsBankRecognizer",
    "US_PASSPORT": "UsPassportRecognizer",
    "US_DRIVER_LICENSE": "UsLicenseRecognizer",
    "UK_NHS": "NhsRecognizer",
    "UK_NINO": "UkNinoRecognizer",
    "IN_AADHAAR": "InAadhaarRecognizer",
    "IN_PAN": "InPanRecognizer",
    "AU_ABN": "AuAbnRecognizer",
    "SG_NRIC": "SgFinRecognizer",
    "IT_FISCAL_CODE": "ItFiscalCodeRecognizer",
    "ES_NIF": "EsNifRecognizer",
    "ES_NIE": "EsNieRecognizer",
    "MEDICAL_LICENSE": "MedicalLicenseRecognizer",
    "URL": "UrlRecognizer",
    "DATE_TIME": "DateRecognizer",
}
"""Looked for where a strategy is named for them: their patterns hold for many other numbers as well."""
OF_CHINA = {
    "CN_ID": (r"(?<!\d)[1-9]\d{5}(?:18|19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx](?![\dXx])", 0.3),
    "CN_PHONE": (r"(?<!\d)(?:\+?86[- ]?)?1[3-9]\d{9}(?!\d)", 0.7),
    "CN_LANDLINE": (r"(?<!\d)0\d{2,3}-\d{7,8}(?!\d)", 0.6),
    "CN_BANK": (r"(?<!\d)62\d{14,17}(?!\d)", 0.3),
}
"""Patterns and how sure they are; the first and the last by their check digits."""
ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
ID_CHECKS = "10X98765432"
BY_MODEL = ("PERSON", "LOCATION", "ORGANIZATION", "NRP")


@dataclass(frozen=True)
class Found:
    """A place in a text."""

    entity: str
    start: int
    end: int
    score: float


Finder = Callable[[str, str], Sequence[Found]]
"""The places of a text in a language."""


def presidio_finder(languages: Sequence[str], spacy_models: Mapping[str, str], wanted: frozenset[str]) -> Finder:
    """Presidio's analyzer over its patterns, without its models of names unless spaCy models are named.

    Args:
        languages: Whose texts it reads.
        spacy_models: Installed ones, by language.
        wanted: Kinds to look for besides those of any case.

    Raises:
        ConfigError: Presidio is not installed, or a model; names the extra, or the model.
        InvalidInput: A kind is not known, or needs a model.
    """
    known = {*OF_PRESIDIO, *ON_DEMAND, *OF_CHINA, *BY_MODEL, "EMAIL_ADDRESS"}
    if unknown := sorted(wanted - known):
        raise InvalidInput("entity_strategy", f"{unknown[0]!r} is not known; send some of {', '.join(sorted(known))}")
    by_model = sorted(wanted & set(BY_MODEL))
    if by_model and not spacy_models:
        raise InvalidInput("spacy_models", f"are missing; {by_model[0]} is found by a language model alone")
    try:
        # An extra, which brings spaCy: seconds to import.
        import presidio_analyzer  # noqa: PLC0415
        import spacy  # noqa: PLC0415
        from presidio_analyzer import predefined_recognizers  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigError(f"personal data is found by the package presidio-analyzer: {INSTALL}") from None
    engine = _engine(presidio_analyzer, spacy, languages, spacy_models)
    registry = presidio_analyzer.RecognizerRegistry(supported_languages=list(languages))
    named = {**OF_PRESIDIO, **{kind: name for kind, name in ON_DEMAND.items() if kind in wanted}}
    for language in languages:
        for name in named.values():
            registry.add_recognizer(getattr(predefined_recognizers, name)(supported_language=language))
        registry.add_recognizer(_mail(predefined_recognizers, language))
        for kind in OF_CHINA:
            registry.add_recognizer(_of_china(presidio_analyzer, kind, language))
        if spacy_models.get(language) and by_model:
            of_model = predefined_recognizers.SpacyRecognizer
            registry.add_recognizer(of_model(supported_language=language, supported_entities=by_model))
    analyzer = presidio_analyzer.AnalyzerEngine(
        registry=registry, nlp_engine=engine, supported_languages=list(languages)
    )

    def find(text: str, language: str) -> list[Found]:
        results = analyzer.analyze(text, language=language)
        return [Found(str(one.entity_type), one.start, one.end, float(one.score)) for one in results]

    return find


def _engine(presidio: Any, spacy: Any, languages: Sequence[str], spacy_models: Mapping[str, str]) -> Any:
    """Words of texts for the hints beside a pattern (``call``, ``card``); from blank pipelines where none is named."""

    class Words(presidio.nlp_engine.SpacyNlpEngine):  # type: ignore[misc]
        def load(self) -> None:
            self.nlp = {language: _pipeline(spacy, language, spacy_models.get(language)) for language in languages}

        def process_text(self, text: str, language: str) -> Any:
            artifacts = super().process_text(text, language)
            if not any(artifacts.lemmas):
                artifacts.lemmas = [token.text.lower() for token in artifacts.tokens]
                # All of them: "call" is a stop word to spaCy, and a hint at a number.
                artifacts.keywords = list(artifacts.lemmas)
            return artifacts

    engine = Words(models=[{"lang_code": language, "model_name": "blank"} for language in languages])
    engine.load()
    return engine


def _pipeline(spacy: Any, language: str, model: str | None) -> Any:
    if model is None:
        return spacy.blank(language)
    try:
        return spacy.load(model)
    except OSError:
        raise ConfigError(f"spacy_models: {model} is not installed: python -m spacy download {model}") from None


def _mail(predefined: Any, language: str) -> Any:
    # Presidio's own asks the network for the list of top-level domains first; the one that tldextract brings will do.
    import tldextract  # noqa: PLC0415

    domains = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    class Mail(predefined.EmailRecognizer):  # type: ignore[misc]
        def validate_result(self, pattern_text: str) -> bool:
            return bool(domains(pattern_text).suffix)

    return Mail(supported_language=language)


def _of_china(presidio: Any, kind: str, language: str) -> Any:
    regex, score = OF_CHINA[kind]

    class OfChina(presidio.PatternRecognizer):  # type: ignore[misc]
        def validate_result(self, pattern_text: str) -> bool | None:
            checks = {"CN_ID": is_chinese_id, "CN_BANK": is_luhn}
            return checks[kind](pattern_text) if kind in checks else None

    pattern = presidio.Pattern(name=kind, regex=regex, score=score)
    return OfChina(supported_entity=kind, patterns=[pattern], supported_language=language, name=f"{kind} ({language})")


def is_chinese_id(text: str) -> bool:
    """Whether the last digit is that of the others: ISO 7064, MOD 11-2, as GB 11643-1999 has it."""
    total = sum(weight * int(digit) for weight, digit in zip(ID_WEIGHTS, text[:17], strict=True))
    return ID_CHECKS[total % 11] == text[17].upper()


def is_luhn(digits: str) -> bool:
    """Whether the last digit is that of the others: Luhn's, ISO/IEC 7812-1."""
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 * (value > 9) for value in doubled) % 10 == 0
