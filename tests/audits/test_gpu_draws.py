from gpulab.audits.gpu_draws import explain_draws


def test_an_audit_is_told_why_two_gpus_drew_other_numbers():
    gpus = "Tesla T4", "NVIDIA GeForce RTX 3090"
    assert "the first 40,960 of its 1,000,000 numbers are the same" in explain_draws("uniform_", 10**6, *gpus)
    assert explain_draws("uniform_", 10**6, *gpus[::-1]).endswith("Tesla T4 with 40,960")
    assert explain_draws("rand", 40_960, *gpus) == "", "then the models explain nothing"
    assert explain_draws("rand", 10**6, "NVIDIA H200", "NVIDIA H100 80GB HBM3") == ""
    assert explain_draws("native_dropout", 10**6, *gpus) == "", "a kernel that divides its numbers otherwise"
    assert explain_draws("rand", 10**6, "Tesla T4", "NVIDIA GeForce RTX 3090 Ti") == "", "one that is not listed"
