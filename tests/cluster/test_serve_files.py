"""The files for `serve deploy` are what Serve and the builders take."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serving.replica import LiveConfig
from serving.serve_config import FOLLOW, ServeConfig

FILES = sorted((Path(__file__).parents[2] / "cluster" / "serve").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_deploy_file_is_read_as_it_is_meant(file):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    (application,) = schema.applications
    module, builder = application.import_path.split(":")
    build = getattr(importlib.import_module(module), builder)
    assert inspect.signature(build).parameters["config"].annotation is ServeConfig
    config = ServeConfig.model_validate(application.args)
    assert (config.disaggregated is not None) == (module == "serving.disaggregated")
    (deployment,) = application.deployments
    assert deployment.name == "Replica"
    # `draftloop serve` gives it from its configuration, `serve deploy` from the file
    assert schema.http_options.request_timeout_s == config.request_timeout_s
    assert LiveConfig.model_validate(deployment.user_config).drafter == (FOLLOW if config.registry else config.drafter)
    assert file.name in file.read_text().splitlines()[0], "its first line says how to deploy it"


def test_there_is_one_for_each_assembly():
    assert {file.stem for file in FILES} >= {"smollm2", "qwen3-8b", "qwen3-8b-disaggregated"}
