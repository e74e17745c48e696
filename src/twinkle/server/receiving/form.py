"""A form with one file in it (``multipart/form-data``), read as it comes: the file is never held as a whole."""

from __future__ import annotations

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from twinkle.core.errors import InvalidInput, TooLarge

_MAX_FIELD_BYTES = 64 * 1024
_MAX_FIELDS = 32


class FileForm:
    """Fields, and one file whose bytes go by."""

    def __init__(self, content_type: str | None, file_field: str) -> None:
        """Begin.

        Args:
            content_type: The request's header.
            file_field: What the file's field is called.

        Raises:
            InvalidInput: It is no form.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidInput("content-type", "must be multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.file_field = file_field
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._num_fields = 0
        self._of_file: list[bytes] = []
        self._has_ended = False

    @property
    def has_file(self) -> bool:
        """Whether the file has begun."""
        return self.filename is not None

    def feed(self, data: bytes) -> list[bytes]:
        """Take in what comes next; what of it is the file's.

        Raises:
            InvalidInput: It is no proper form.
            TooLarge: It has very many fields, or very long ones.
        """
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise InvalidInput("body", f"is no proper multipart/form-data: {error}") from error
        found, self._of_file = self._of_file, []
        return found

    def finish(self) -> None:
        """There is no more.

        Raises:
            InvalidInput: It ends within a field, or had no file.
        """
        if not self._has_ended:
            raise InvalidInput("body", "ends before the form does")
        if not self.has_file:
            raise InvalidInput(self.file_field, "is missing; send the file in this field")

    def _begin_part(self) -> None:
        self._num_fields += 1
        if self._num_fields > _MAX_FIELDS:
            raise TooLarge(f"the form has more than {_MAX_FIELDS} fields")
        self._headers, self._header_name, self._header_value = {}, b"", b""
        self._value = bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == self.file_field
        if self._is_file:
            if self.has_file:
                raise InvalidInput(self.file_field, "comes twice; send one file")
            self.filename = options.get(b"filename", b"").decode(errors="replace") or "upload"

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._of_file.append(data[start:end])
            return
        if len(self._value) + end - start > _MAX_FIELD_BYTES:
            raise TooLarge(f"{self._name[:64]}: has more than {_MAX_FIELD_BYTES} bytes")
        self._value += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._has_ended = True
