"""What `behind` starts a JupyterHub with: the package's own sample, with a test's ports and users."""

import os
import sys

c = get_config()  # noqa: F821

load_subconfig(os.environ["LAB_SAMPLE"])  # noqa: F821

c.JupyterHub.bind_url = os.environ["LAB_PROXY"]
c.JupyterHub.hub_bind_url = os.environ["LAB_HUB"]
# A proxy of its own, as on a real machine: it and what is behind it stay while the Hub restarts.
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = os.environ["LAB_PROXY_API"]
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cookie_secret = bytes.fromhex(os.environ["LAB_COOKIES"])

c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = f"{os.getcwd()}/{{username}}"
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--allow-root"] if os.getuid() == 0 else []
c.Spawner.environment |= {
    "NNSIGHT_LAB_URL": f"{os.environ['LAB_PROXY']}/services/nnsight-lab",
    "LAB_MARK": os.environ["LAB_MARK"],
    "JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp",
}

c.Authenticator.allowed_users = {"alice", "bob", "carol", "teacher", "service:tests"}
c.Authenticator.admin_users = {"root"}
c.JupyterHub.load_groups["nnsight-lab"]["users"] = ["alice", "bob", "service:tests"]
c.JupyterHub.load_groups["nnsight-lab-admins"]["users"] = ["teacher"]

c.JupyterHub.services[0] |= {"url": os.environ["LAB_ENGINE"], "api_token": os.environ["LAB_SERVICE_TOKEN"]}
c.JupyterHub.services.append({"name": "tests", "api_token": os.environ["LAB_TESTS_TOKEN"]})
c.JupyterHub.load_roles.append(
    {
        "name": "tests",
        "scopes": [
            "admin:users",
            "admin:servers",
            "access:servers",
            "tokens",
            "read:users",
            "access:services!service=nnsight-lab",
        ],
        "services": ["tests"],
    }
)
