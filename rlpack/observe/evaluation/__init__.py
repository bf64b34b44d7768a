"""The files and statistics of `rlpack evaluate`.

- `evaluation_dir`: the directory of an evaluation, and the arguments that it belongs to.
- `sample_rows`: samples.jsonl, written part by part and read again after a kill.
- `pass_at_k`, `bootstrap`: estimators on NumPy arrays.
- `evaluation_results`: results.json, from the rows of samples.jsonl.
- `samples_page`: samples.html, for reading the responses offline.
"""
