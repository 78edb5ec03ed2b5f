"""What a user's catalogue may say: nonsense is refused with file, entry and key; digits of flags likewise."""

import argparse

import pytest

from whywait import flags, simulating
from whywait.errors import UsageError
from whywait.physics import checked, machines
from whywait.physics.arch import arch_of
from whywait.physics.catalog import models, raw
from whywait.sim import catalog, techniques

MACHINES = [
    ("read_tbs = 0", "read_tbs"), ("read_tbs = nan", "read_tbs"), ("read_tbs = -3", "read_tbs"),
    ("memory_gb = inf", "memory_gb"), ('memory_gb = "80"', "memory_gb"), ("memory_gb = true", "memory_gb"),
    ("flops_tf = {}", "flops_tf"), ("flops_tf = 900", "flops_tf"), ("flops_tf = { bf16 = 0 }", "flops_tf.bf16"),
    ("flops_tf = { bf16 = -100 }", "flops_tf.bf16"), ("flops_tf = { bf16 = 9, pf8 = 9 }", "nearest: fp8"),
    ("price_usd_h = [-5, -1]", "price_usd_h"), ("price_usd_h = [5, 1]", "price_usd_h"),
    ("price_usd_h = 3", "price_usd_h"),
    ("tdp_w = -1", "tdp_w"), ("link_gbs = 0", "link_gbs"), ("node = 0", "node"), ("node = 2.5", "node"),
    ("scatter = -2", "scatter"), ("scatter = nan", "scatter"),
    ('fit = "nonsense"', "fit"), ('fit = "h100sxm"', "h100_sxm"),
    ("read_tb = 3", "nearest: read_tbs"), ('words = "h9"', "words"), ("source = 3", "source"),
]  # fmt: skip
MODELS = [
    ("layers = 2.5", "layers"), ("layers = -4", "layers"), ('hidden = "big"', "hidden"), ("heads = 0", "heads"),
    ("kv_heads = 0", "kv_heads"), ("kv_heads = 64", "kv_heads"), ("linear_layers = 900", "linear_layers"),
    ("window = -1", "window"), ("window = 128\nwindow_layers = 900", "window_layers"), ("window_layers = 4", "window"),
    ("experts = 128\nchosen = 500\nexpert_inter = 9", "chosen"), ("experts = 8", "chosen"),
    ("hiden = 3", "nearest: hidden"),
    ('native = "zork"', "native"), ('gated = "yes"', "gated"), ("layers = 99999999999999999999", "layers"),
    ("linear_layers = 3", "linear_in"), ("latent = 512", "value_size"),
    ("window = 9\nwindow_layers = 20\nlinear_layers = 20\nlinear_in = 9\nlinear_out = 9", "linear_layers"),
]  # fmt: skip


def refused(call, *args):
    with pytest.raises(UsageError) as found:
        call(*args)
    assert found.value.exit_code == 2
    return f"{found.value.message} → {found.value.hint}"


@pytest.fixture
def mine(tmp_path):
    yield tmp_path / "mine.toml"
    catalog.use(None)


@pytest.mark.parametrize(("line", "key"), MACHINES)
def test_a_machine_that_cannot_be_is_refused(line, key, mine):
    mine.write_text(f'[machines.mm]\nbase = "h200"\n{line}\n')
    said = refused(catalog.use, str(mine))
    assert all(word in said for word in (str(mine), "'mm'", key))


@pytest.mark.parametrize(("line", "key"), MODELS)
def test_a_model_that_cannot_be_is_refused(line, key, mine):
    mine.write_text(f'[models.qq]\nbase = "llama-3.1-8b"\n{line}\n')
    said = refused(catalog.use, str(mine))
    assert all(word in said for word in (str(mine), "'qq'", key))


def test_what_can_be_is_taken(mine):
    mine.write_text('[machines.mm]\nbase = "h200"\nread_tbs = 9.6\n'
                    'price_usd_h = [2, 2]\nfit = "b200_sxm"\nscatter = 0\n'
                    '[models.qq]\nbase = "llama-3.1-8b"\nwindow = 4096\n'
                    'window_layers = 16\nnative_experts = ""\n')  # fmt: skip
    catalog.use(str(mine))
    assert catalog.machine_named("mm").read_bytes_per_s == 9.6e12
    assert simulating.deployment_of("mm", "qq").model.window_layers == 16


def test_a_file_with_one_entry_is_checked_too(tmp_path):
    machine, model = tmp_path / "machine.toml", tmp_path / "model.toml"
    machine.write_text("[mm]\nread_tbs = 3\nmemory_gb = 80\nflops_tf = { bf16 = -9 }\n")
    model.write_text("[qq]\nhidden = 4096\nlayers = 2.5\n")
    said = refused(machines.machine, str(machine))
    assert all(word in said for word in (str(machine), "'mm'", "flops_tf.bf16"))
    said = refused(arch_of, str(model))
    assert all(word in said for word in (str(model), "'qq'"))


def test_what_ships_holds_to_the_same():
    for each in machines.MACHINES:
        checked.check_machine(each.name, machines.raw(each.name))
    for name in models():
        checked.check_model(name, raw(name))


@pytest.mark.parametrize(
    "text",
    ["max-seqs=²", "max-seqs=٣", "max-seqs=99999999999999999999", "token-budget=1.5", "tp=²", "pd=²:1",
     "pd=1:1:overlap=abc",
     "pd=1:1:overlap=nan", "spec-ngram:drafts=2.7", "spec-ngram:drafts=²", "spec-ngram:drafts=0"],
)  # fmt: skip
def test_figures_of_a_technique_that_are_none_are_refused(text):
    assert text in refused(techniques.apply, text, simulating.deployment_of("h100", "llama-3.1-8b"))


def test_whole_numbers_of_flags_are_plain_digits():
    assert flags.positive("12") == 12
    for text in ("²", "0", "1.5", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError):
            flags.positive(text)
