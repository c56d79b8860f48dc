"""Finds a model's directory: a local one, or a hub id, downloaded through huggingface_hub.

Its cache, its offline mode (HF_HUB_OFFLINE) and its tokens (HF_TOKEN, a saved login) apply. Only files that execute
nothing are downloaded: weights in safetensors, JSON, chat templates. Knows nothing of their content.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from outrider.export.disk import telling_of_full_disks
from outrider.models.errors import ExportError
from outrider.models.process.extras import missing_extra

SAFE_FILES: Final = ("*.safetensors", "*.json", "*.jinja")
# Folders hold other formats, and these the same weights once more, for other loaders.
_NOT_NEEDED: Final = ("*/*", "consolidated*.safetensors")
_HUB_ID: Final = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")


def resolve_model(model: str | Path) -> Path:
    """The directory of a model: `model` itself if it is one, else that of the hub id "org/name" or "org/name@revision".

    The revision is a branch, tag or commit; the hub's default if none is named. Blocks while downloading; what the
    cache has is not downloaded again. Raises ExportError if there is no such directory or model, if access is refused,
    or if it is not in the cache and the hub cannot be reached.
    """
    path = Path(model)
    if str(model) == "":
        raise ExportError("the model's name is empty; expected a local Hugging Face model directory or a hub id")
    if path.is_dir():
        return path.resolve()
    match = _HUB_ID.fullmatch(str(model))
    if match is None or (path.parent.is_dir() and match["revision"] is None):
        raise ExportError(f"{model} is not a directory; expected a local Hugging Face model directory or a hub id")
    return _download(match["id"], match["revision"])


def _download(hub_id: str, revision: str | None) -> Path:
    try:
        import httpx
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"downloading {hub_id}", "export") from None
    what = f"{hub_id} at revision {revision}" if revision else hub_id
    offline = constants.is_offline_mode()
    has_token = huggingface_hub.get_token() is not None
    login = (
        "A token was sent: check that it has access." if has_token else "Log in with `hf auth login`, or set HF_TOKEN."
    )
    cache = Path(constants.HF_HUB_CACHE)
    try:
        with telling_of_full_disks(cache):
            found = Path(
                huggingface_hub.snapshot_download(
                    hub_id, revision=revision, allow_patterns=list(SAFE_FILES), ignore_patterns=list(_NOT_NEEDED)
                )
            ).resolve()
    except errors.GatedRepoError:
        raise ExportError(
            f"{hub_id} is gated, and its terms are accepted on the hub's page of the model. {login}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ExportError(
            f"{hub_id} has no revision {revision!r} on the hub; give a branch, a tag or a commit"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ExportError(f"the hub at {constants.ENDPOINT} has no model {hub_id}, or it is private. {login}") from None
    except errors.HFValidationError as error:
        raise ExportError(f"{hub_id} is neither a directory nor a hub id: {error}") from None
    except errors.LocalEntryNotFoundError as error:
        if offline:
            raise ExportError(
                f"{what} is not in the cache ({cache}), and offline mode is on; unset HF_HUB_OFFLINE to download it"
            ) from None
        raise ExportError(_unreachable(what, constants.ENDPOINT, cache, error.__cause__ or error)) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ExportError(f"the hub refuses {hub_id} (HTTP {status}). {login}") from None
        raise ExportError(f"the hub answers {status} for {what}; try again later") from None
    except (httpx.HTTPError, OSError) as error:
        raise ExportError(_unreachable(what, constants.ENDPOINT, cache, error)) from None
    if not any(found.glob("*.safetensors")):
        raise ExportError(
            f"the hub offers no *.safetensors of {what}, and pickled weights are not taken: they execute code on load; "
            f"choose another model (or, if only a part of it is in the cache, {cache}, download it again)"
        )
    return found


def _unreachable(what: str, endpoint: str, cache: Path, error: BaseException) -> str:
    return (
        f"{what} is not in the cache ({cache}), and the hub at {endpoint} cannot be reached: {error}. Check the "
        "network (HF_ENDPOINT names a mirror)"
    )
