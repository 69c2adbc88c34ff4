"""What Flower runs at a site: it hands bytes to the process of the site and brings its answer back.

No data, no state and no policy are here: these are in the process at the other end of the socket, in another account.
An exception would be sent to the server with its text, so that anything that goes wrong is an empty answer.
"""

import os
from multiprocessing.connection import Client
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def relay(message: Message, context: Context) -> Message:
    """One call to the site, and the answer."""
    try:
        parts: Any = message.content["ppfl"]
        path = context.node_config.get("ppfl-socket") or os.environ["PPFL_SOCKET"]
        with Client(str(path), "AF_UNIX") as site:
            for name in ("shared", "own"):
                site.send_bytes(parts[name].data)
            answer = site.recv_bytes()
    except Exception:
        answer = b""
    array = Array(dtype="uint8", shape=(len(answer),), stype="bytes", data=answer)
    return Message(RecordDict({"ppfl": ArrayRecord({"answer": array})}), reply_to=message)
