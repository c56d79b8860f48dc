"""From what the user calls a model to a directory: a local one, or a hub id, downloaded through huggingface_hub.

Its cache, its offline mode (HF_HUB_OFFLINE) and its tokens (HF_TOKEN, a saved login) are respected. Only files that
execute nothing are fetched: weights in safetensors, JSON, chat templates. Knows nothing of what is in them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from outrider.export.disk import telling_of_full_disks
from outrider.export.quiet import missing_extra
from outrider.models.errors import ExportError

SAFE_FILES: Final = ("*.safetensors", "*.json", "*.jinja")
# Folders hold other formats, and these the same weights once more, for other loaders.
_NOT_NEEDED: Final = ("*/*", "consolidated*.safetensors")
_HUB_ID: Final = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")


def resolve_model(model: str | Path, revision: str | None = None) -> Path:
    """The directory of a model: `model` itself if it is one, else that of the hub id "org/name" or "org/name@revision".

    revision: a branch, tag or commit of a hub id; the hub's default if neither gives one. Blocks while downloading;
    what the cache has is not fetched again. Raises ExportError, saying why, if there is no such directory or model, it
    may not be read, or cannot be reached and is not in the cache.
    """
    path = Path(model)
    if path.is_dir():
        if revision is not None:
            raise ExportError(f"{model} is a local directory, which has no revision {revision!r}; leave it out")
        return path.resolve()
    match = _HUB_ID.fullmatch(str(model))
    if match is None or (path.parent.is_dir() and match["revision"] is None):
        raise ExportError(f"{model} is not a directory; expected a local Hugging Face model directory, or a hub id")
    if revision is not None and match["revision"] not in (None, revision):
        raise ExportError(f"{model} names another revision than {revision}; give one of the two")
    return _download(match["id"], revision or match["revision"])


def _download(hub_id: str, revision: str | None) -> Path:
    try:
        import httpx
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"downloading {hub_id}") from None
    what = f"{hub_id} at revision {revision}" if revision else hub_id
    offline = constants.is_offline_mode()
    has_token = huggingface_hub.get_token() is not None
    login = (
        "Your token was sent; does it have access?" if has_token else "Log in with `hf auth login`, or set HF_TOKEN."
    )
    cache = Path(constants.HF_HUB_CACHE)
    try:
        with telling_of_full_disks(cache):
            return Path(
                huggingface_hub.snapshot_download(
                    hub_id, revision=revision, allow_patterns=list(SAFE_FILES), ignore_patterns=list(_NOT_NEEDED)
                )
            ).resolve()
    except errors.GatedRepoError:
        raise ExportError(f"{hub_id} is gated: its terms must be accepted on the hub first. {login}") from None
    except errors.RevisionNotFoundError:
        raise ExportError(
            f"{hub_id} has no revision {revision!r} on the hub; give a branch, a tag or a commit"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ExportError(
            f"the hub at {constants.ENDPOINT} shows no model {hub_id}: it does not exist, or it is private. {login}"
        ) from None
    except errors.HFValidationError as error:
        raise ExportError(f"{hub_id} is neither a directory nor a hub id: {error}") from None
    except errors.LocalEntryNotFoundError as error:
        if offline:
            raise ExportError(
                f"{what} is not in the cache ({cache}), and offline mode is on; unset HF_HUB_OFFLINE to download it, "
                "or give a local directory"
            ) from None
        raise ExportError(_unreachable(what, constants.ENDPOINT, cache, error.__cause__ or error)) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ExportError(f"the hub refuses {hub_id} (HTTP {status}). {login}") from None
        raise ExportError(f"the hub answers {status} for {what}; try again later, or give a local directory") from None
    except (httpx.HTTPError, OSError) as error:
        raise ExportError(_unreachable(what, constants.ENDPOINT, cache, error)) from None


def _unreachable(what: str, endpoint: str, cache: Path, error: BaseException) -> str:
    return (
        f"{what} is not in the cache ({cache}), and the hub at {endpoint} cannot be reached: {error}. Check the "
        "network, set HF_ENDPOINT to a mirror, or give a local directory"
    )
