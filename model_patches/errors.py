"""Errors about models, without any knowledge of the server.

    ModelError
    ├── UnsupportedModelError   the model, or its config.json, asks for something that is not supported or not sound
    ├── ModelNotFoundError      what the user named cannot be had: no such folder, file or hub name, or no network
    ├── DamagedModelError       it is there, but it is not what it should be: wrong checksum, missing weights
    └── CacheFolderError        the folder for converted models cannot be used

`service` turns them into a `StartupError`; nothing here imports from `service`. Every message names what is to
blame and says what to do.
"""


class ModelError(Exception):
    """Root of all errors about models."""


class UnsupportedModelError(ModelError):
    """A model cannot be served as it is; the message names what it asks for and what is supported."""


class ModelNotFoundError(ModelError):
    """A model cannot be had under the name that was given; the message says where it was looked for."""


class DamagedModelError(ModelError):
    """A model's files are incomplete or not the ones that were expected."""


class CacheFolderError(ModelError):
    """The folder for converted models cannot be created or written."""
