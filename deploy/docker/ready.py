"""Asks the server in this container for its readiness: the images' HEALTHCHECK, and Kubernetes' liveness probe.

    ready.py                exit status 0 if the server takes work, 1 if not
    ready.py --not-failed   0 unless the server does not answer, or its engine has failed; for a restart

The address is OUTRIDER_READY_URL, or port 8000 on loopback over plain HTTP. Where the server asks clients for a
certificate, OUTRIDER_READY_CERT and OUTRIDER_READY_KEY name the files of one. Needs only Python: no package is loaded.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

DEFAULT_URL = "http://127.0.0.1:8000/health/ready"
TIMEOUT_S = 5.0


def status_at(url: str) -> str:
    """The server's `status`: "ready", "draining" or "failed". Raises OSError or ValueError if it gives none."""
    # The certificate names the public host, and this connection does not leave the machine.
    unchecked = ssl.create_default_context()
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE
    if certificate := os.environ.get("OUTRIDER_READY_CERT"):
        unchecked.load_cert_chain(certificate, os.environ.get("OUTRIDER_READY_KEY"))
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unchecked)
    )
    try:
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            body = answer.read(65536)
    except urllib.error.HTTPError as refused:  # 503 while draining or failed
        with refused:
            body = refused.read(65536)
    document = json.loads(body)
    if not isinstance(document, dict) or "status" not in document:
        raise ValueError(f"{url} answers, but not with the readiness of an Outrider server")
    return str(document["status"])


def main() -> None:
    """Runs the check."""
    url = os.environ.get("OUTRIDER_READY_URL", DEFAULT_URL)
    try:
        status = status_at(url)
    except (OSError, ValueError) as error:
        sys.exit(f"no readiness from {url}: {error}")
    print(status)
    is_good = status != "failed" if "--not-failed" in sys.argv[1:] else status == "ready"
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
