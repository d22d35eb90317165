"""Downloads for `ADD URL`."""

from __future__ import annotations

import email.utils
import hashlib
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pier.errors import ImageError
from pier.network.outside import Outside, Targets
from pier.network.policy import NetworkPolicy


async def download_for_add(url: str, directory: Path, network: NetworkPolicy, checksum: str = "") -> tuple[Path, str]:
    """Fetch `url` into `directory`, as ADD keeps it: mode 600, the time that the server tells. The file and its
    digest. The URL and its redirects reach what RUN would reach under `network`."""
    import aiohttp

    from pier.image.outbound import HostRefused, open_session

    name = Path(unquote(urlsplit(url).path)).name
    name = name if name.strip(".") else "__unnamed__"
    path = directory / name
    digest = hashlib.sha256()
    try:
        check = Targets(network, Outside()).of_host
        async with open_session(check, connect_seconds=60) as session, session.get(url) as answer:
            if answer.status != 200:
                raise ImageError(f"{url} answered {answer.status}", code="download", retryable=answer.status >= 500)
            with path.open("wb") as sink:
                async for chunk in answer.content.iter_chunked(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
            modified = answer.headers.get("Last-Modified", "")
    except HostRefused as error:
        raise ImageError(
            f"cannot fetch {url}: the build's network policy ({network.mode}) refuses {error}",
            code="refused",
            blame="task",
            hint="allow the host in metadata.pier.build_network of task.toml, or COPY the file from the build context",
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ImageError(f"{url} cannot be fetched: {error}", code="download", retryable=True) from error
    found = f"sha256:{digest.hexdigest()}"
    if checksum and checksum != found:
        raise ImageError(f"{url} has the digest {found}, not {checksum}", code="digest", blame="task")
    path.chmod(0o600)
    parsed = email.utils.parsedate_to_datetime(modified).timestamp() if modified else 0.0
    os.utime(path, (parsed, parsed))
    return path, found
