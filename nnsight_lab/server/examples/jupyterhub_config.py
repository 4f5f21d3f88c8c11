"""A JupyterHub whose users share one engine; `nnsight-lab serve --example hub` prints this file.

The engine is an *external* service: the Hub starts no command. A Hub waits 30 seconds for a service that it
starts itself, and exits where that does not answer; a model takes minutes to load. Start the engine by
systemd (`nnsight-lab serve --example systemd`), before or after the Hub. Copy the lines between the two marks
into your own configuration; JupyterHub 5.2 or newer.
"""

import secrets

c = get_config()  # noqa: F821

# --- nnsight-lab: from here ------------------------------------------------------------------------------

#: Where browsers and notebooks reach the Hub's proxy, and where its proxy reaches the engine.
HUB = "http://127.0.0.1:8000"
ENGINE = "http://127.0.0.1:8100"

c.JupyterHub.services = [
    {
        "name": "nnsight-lab",
        "url": ENGINE,
        # The Hub wants one for each service. The engine needs none: it asks the Hub with its users' tokens.
        "api_token": secrets.token_hex(32),
        "display": False,  # no page of it is for a browser
    }
]

# Who may use the engine, and who may publish edits on it (`--admin-group nnsight-lab-admins`; the Hub's own
# admins may, too). To let everybody use it, give the role "user" the scopes "self" and this one instead.
c.JupyterHub.load_groups = {"nnsight-lab": {"users": []}, "nnsight-lab-admins": {"users": []}}
c.JupyterHub.load_roles = [
    {
        "name": "nnsight-lab",
        "scopes": ["access:services!service=nnsight-lab"],
        "groups": ["nnsight-lab", "nnsight-lab-admins"],
    }
]

# A notebook's token may do what is listed here, and no more than its user may; the first two are JupyterHub's
# own.
c.Spawner.server_token_scopes = [
    "users:activity!user",
    "access:servers!server",
    "access:services!service=nnsight-lab",
]

# By this `%engine attach` finds the engine, and it is the one address the notebook's token is sent to.
c.Spawner.environment = {"NNSIGHT_LAB_URL": f"{HUB}/services/nnsight-lab"}

# --- nnsight-lab: to here --------------------------------------------------------------------------------
