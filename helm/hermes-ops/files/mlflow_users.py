"""Before MLflow starts: its log-in's settings, and its users with the passwords of the Secret."""

import configparser
import os
from importlib import import_module
from pathlib import Path

SECRET = Path(os.environ.get("MLFLOW_USERS_SECRET", "/run/secrets/mlflow-users"))
USERS = {"admin": True, "hermes": False, "trials": False}  # whether each is an administrator

address = os.environ["MLFLOW_BACKEND_STORE_URI"]
settings = configparser.ConfigParser(interpolation=None)
settings["mlflow"] = {
    # What a user may do who has been given no other permission: log, but not delete or share.
    "default_permission": "EDIT",
    "database_uri": address.replace("%", "%%"),
    "admin_username": "admin",
    "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
    # Log-ins are checked for every logged batch; a cached check is three times as fast.
    "auth_cache_ttl_seconds": "60",
}
with Path(os.environ["MLFLOW_AUTH_CONFIG_PATH"]).open("w") as file:
    settings.write(file)

# Reads the settings as it is imported.
store = import_module("mlflow.server.auth.sqlalchemy_store").SqlAlchemyStore()
store.init_db(address)
for user, is_admin in USERS.items():
    password = (SECRET / f"{user}-password").read_text().strip()
    if store.has_user(user):
        store.update_user(user, password=password, is_admin=is_admin)
    else:
        store.create_user(user, password, is_admin=is_admin)
