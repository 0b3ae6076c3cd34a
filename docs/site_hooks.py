"""What MkDocs does to the pages for the site, see mkdocs.yml.

Pages link to files of the repository beside docs/, which are not on the site. There these links
lead to RL2_REPOSITORY, the address of the repository's files, such as
https://github.com/OWNER/rl2/blob/main. Without it only their text is left.
"""

import os
import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the text of a page with other links to the files beside docs/."""
    repository = os.environ.get("RL2_REPOSITORY", "").rstrip("/")
    target = rf"[\1]({repository}/\2)" if repository else r"\1"
    return OUTSIDE.sub(target, markdown)
