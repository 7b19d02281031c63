"""The node agent's log: one JSON object a line on stderr, with the keys of the plugin's lines.

Libraries may warn and nothing more: at debug level the API client prints answers, tokens included.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from istio_cni.errors import quoted

LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40}
SCOPE = "cni-agent"


class Line(logging.Formatter):
    """Writes a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        level = "warn" if record.levelname == "WARNING" else record.levelname.lower()
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.created % 1 * 1e6):06d}Z",
            "level": level,
            "scope": record.name,
            "msg": record.getMessage(),
        }
        if (settings := getattr(record, "settings", None)) is not None:
            line["settings"] = settings
        if record.exc_info:
            line["stack"] = quoted(self.formatException(record.exc_info))
        return json.dumps(line)


def start(level: str) -> None:
    """Write from now on; `level` is this program's own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Line())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(SCOPE).setLevel(LEVELS[level])
