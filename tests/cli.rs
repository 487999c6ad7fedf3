//! The program as a person runs it: its table, its files, its errors and its exit status.
//!
//! `LATENTWAVE_BIN` names the program to test (by default the one built beside this test), `LATENTWAVE_DATA_DIR` the folder of
//! the trace excerpt (by default `data`).

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

/// Five requests; the second is the longest, with 70 + 29 cached tokens.
const TRACE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
    2023-11-16 18:15:46.6805900,37,12\r\n\
    2023-11-16 18:15:50.9951690,70,30\r\n\
    2023-11-16 18:15:51.2224670,5,1\r\n\
    2023-11-16 18:15:51.3910170,9,17\r\n\
    2023-11-16 18:15:52.0000000,64,8\r\n";

/// Tokens that those requests decode: all but the first of each.
const DECODED: u64 = 12 + 30 + 1 + 17 + 8 - 5;

/// A small model: five heads of 256 + 32.
const SMALL: &[&str] = &["--model", "minicpm3", "--tp", "8", "--page-size", "16", "--max-num-seqs", "3"];

fn program() -> Command {
    let built = option_env!("CARGO_BIN_EXE_latentwave").map(PathBuf::from);
    let path = std::env::var_os("LATENTWAVE_BIN").map(PathBuf::from).or(built);
    Command::new(path.expect("LATENTWAVE_BIN names the program"))
}

fn excerpt() -> PathBuf {
    let folder = std::env::var_os("LATENTWAVE_DATA_DIR").map_or_else(|| PathBuf::from("data"), PathBuf::from);
    folder.join("azure_conv_excerpt.csv")
}

/// A file of this test's own.
struct Scratch(PathBuf);

impl Scratch {
    fn new(ending: &str) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("latentwave-cli-{}-{}{ending}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self(std::env::temp_dir().join(name))
    }

    fn holding(ending: &str, content: &str) -> Self {
        let scratch = Self::new(ending);
        std::fs::write(&scratch.0, content).unwrap();
        scratch
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn read(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct Ran {
    status: Option<i32>,
    out: String,
    err: String,
}

fn run(args: &[&str]) -> Ran {
    let output = program().args(args).output().unwrap();
    Ran {
        status: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

impl Ran {
    /// Checks the exit status, and that every word is in the output.
    #[track_caller]
    fn shows(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, Some(status), "{}\n{}", self.out, self.err);
        for word in words {
            assert!(self.out.contains(word), "`{word}` is missing in\n{}", self.out);
        }
    }

    /// Checks that the command failed with a message that says all this.
    #[track_caller]
    fn fails(&self, words: &[&str]) {
        assert_eq!(self.status, Some(1), "{}\n{}", self.out, self.err);
        let message = self.err.lines().find(|line| line.starts_with("error: ")).expect("an error message");
        for word in words {
            assert!(message.contains(word), "`{word}` is missing in `{message}`");
        }
    }
}

/// Replays the small trace and returns the JSON file.
fn replay(more: &[&str]) -> (Ran, Value) {
    let trace = Scratch::holding(".csv", TRACE);
    let json = Scratch::new(".json");
    let args = [&["replay", trace.path(), "--json", json.path()], SMALL, more].concat();
    let ran = run(&args);
    assert!(json.0.exists(), "no JSON file\n{}\n{}", ran.out, ran.err);
    let value = serde_json::from_str(&json.read()).unwrap();
    (ran, value)
}

#[test]
fn a_replay_generates_all_tokens_right_without_allocating() {
    let report = Scratch::new(".html");
    let (ran, json) = replay(&["--verify", "4", "--report", report.path()]);
    ran.shows(0, &["5 finished", "tokens/s", "p50", "GB/s", "0 missed", "allocations  0 per step, at most 0", "FULL"]);
    assert_eq!(json["decoded_tokens"], DECODED);
    assert_eq!(json["first_tokens"], 5);
    assert_eq!(json["prompt_tokens"], 37 + 70 + 5 + 9 + 64);
    assert_eq!(json["allocations_per_step_max"], 0);
    assert_eq!(json["verified"]["misses"], 0);
    let steps = json["steps"].as_array().unwrap();
    assert_eq!(json["verified"]["rows"], 4 * steps.len() as u64);
    assert_eq!(json["full_graph_share_of_decode_steps"], 1.0);
    let page = report.read();
    assert!(page.contains("<svg") && page.contains("Step time"));
}

#[test]
fn every_graph_mode_policy_and_type_is_right() {
    for more in [
        &["--graph-mode", "none"][..],
        &["--graph-mode", "full", "--no-piecewise"],
        &["--capture-sizes", "2", "--split-policy", "fixed:3"],
        &["--split-policy", "invariant:32", "--page-size", "7", "--layers", "3"],
        &["--dtype", "f32", "--split-policy", "min-tokens:16"],
        &["--dtype", "f16", "--kv-dtype", "fp8_e4m3", "--kv-scale", "0.05"],
        &["--kv-dtype", "fp8_e4m3fnuz"],
        &["--arrivals", "trace"],
        &["--max-num-batched-tokens", "11"],
    ] {
        let (ran, json) = replay(&[more, &["--verify", "2"]].concat());
        ran.shows(0, &["5 finished", "0 missed"]);
        assert_eq!(json["decoded_tokens"], DECODED, "{more:?}");
        assert!(json["verified"]["rows"].as_u64() > Some(0), "{more:?}");
    }
}

#[test]
fn graphs_serve_what_was_captured() {
    let (ran, json) = replay(&["--capture-sizes", "2"]);
    ran.shows(0, &["the largest full graph of this kind has 2 tokens", "FULL"]);
    let modes: Vec<&str> =
        json["served"].as_array().unwrap().iter().map(|served| served["mode"].as_str().unwrap()).collect();
    assert!(modes.contains(&"NONE"), "{modes:?}");
    let (_, json) = replay(&["--graph-mode", "none"]);
    assert_eq!(json["setting"]["graph_mode"], "NONE");
    assert_eq!(json["full_graph_share_of_decode_steps"], 0.0);
}

#[test]
fn drafts_are_verified_and_accepted_as_asked() {
    for (acceptance, accepted) in [("0", 0), ("1", 1)] {
        let (ran, json) = replay(&["--spec-tokens", "2", "--acceptance", acceptance, "--verify", "3", "--layers", "2"]);
        ran.shows(0, &["5 finished", "accepted", "0 missed"]);
        assert_eq!(json["decoded_tokens"], DECODED);
        let drafts = json["drafts"].as_array().unwrap();
        assert_eq!(drafts[1].as_u64(), drafts[0].as_u64().map(|offered| offered * accepted));
        assert_eq!(json["allocations_per_step_max"], 0);
    }
    let [slow, fast] =
        ["0", "1"].map(|p| replay(&["--spec-tokens", "2", "--acceptance", p]).1["steps"].as_array().unwrap().len());
    assert!(fast < slow, "{fast} steps with every draft accepted, {slow} with none");
}

#[test]
fn a_seed_makes_a_run_repeat() {
    let made = |seed| {
        let (_, json) = replay(&["--spec-tokens", "3", "--acceptance", "0.5", "--seed", seed]);
        json["steps"].as_array().unwrap().iter().map(|step| step["generated"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(made("7"), made("7"));
}

#[test]
fn what_does_not_fit_is_rejected_and_counted() {
    let (ran, json) = replay(&["--max-model-len", "80"]);
    ran.shows(0, &["4 finished, 1 rejected"]);
    assert_eq!(json["decoded_tokens"], DECODED - 29);
    let (_, json) = replay(&["--num-pages", "5"]);
    assert_eq!((&json["rejected"], &json["finished"]), (&Value::from(1), &Value::from(4)));
    // A trace of which nothing runs was not replayed.
    let trace = Scratch::holding(".csv", TRACE);
    let none = run(&[&["replay", trace.path(), "--max-model-len", "4"], SMALL].concat());
    none.fails(&["none of the 5 requests fits 4 tokens", "--max-model-len"]);
}

#[test]
fn the_excerpt_runs() {
    let excerpt = excerpt();
    let more = ["--max-steps", "12", "--verify", "1", "--max-num-batched-tokens", "512"];
    let args = [&["replay", excerpt.to_str().unwrap()], SMALL, &more].concat();
    run(&args).shows(0, &["left over", "0 missed", "FULL"]);
}

#[test]
fn a_miss_makes_the_status_3() {
    let (ran, json) = replay(&["--verify", "2", "--tolerance", "0"]);
    ran.shows(3, &["missed"]);
    assert!(ran.err.contains("miss: request"), "{}", ran.err);
    assert!(json["verified"]["misses"].as_u64() > Some(0));
}

#[test]
fn models_from_a_file() {
    let config = r#"{"num_attention_heads": 4, "num_hidden_layers": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16}"#;
    let file = Scratch::holding(".json", config);
    let trace = Scratch::holding(".csv", TRACE);
    let args = ["replay", trace.path(), "--model", file.path(), "--layers", "all", "--dtype", "f32", "--verify", "2"];
    run(&args).shows(0, &["4 heads, 2 layers", "5 finished", "0 missed"]);
    let broken = Scratch::holding(".json", &config[..60]);
    run(&["replay", trace.path(), "--model", broken.path()]).fails(&[broken.path(), "line 1", "whole"]);
    let missing = Scratch::holding(".json", r#"{"num_attention_heads": 4}"#);
    run(&["replay", trace.path(), "--model", missing.path()]).fails(&["key `kv_lora_rank`", "missing"]);
}

#[test]
fn bad_traces_name_the_line() {
    for (content, words) in [
        ("", &["TIMESTAMP"][..]),
        ("TIMESTAMP,ContextTokens\r\n1,2\r\n", &["GeneratedTokens"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n1.0,5,6\r\n2.0,5", &["line 3", "2 fields"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1.0,many,6\n", &["line 2", "ContextTokens", "`many`"]),
    ] {
        let trace = Scratch::holding(".csv", content);
        run(&["replay", trace.path()]).fails(&[&[trace.path()], words].concat());
    }
    run(&["replay", "no/such/trace.csv"]).fails(&["no/such/trace.csv"]);
}

#[test]
fn bad_arguments_name_the_fix() {
    let trace = Scratch::holding(".csv", TRACE);
    for (more, words) in [
        (&["--model", "gpt-2"][..], &["`gpt-2`", "deepseek-v3"][..]),
        (&["--tp", "3"], &["tensor_parallel", "[1, 2, 4, 8, 16]"]),
        (&["--page-size", "0"], &["page_size"]),
        (&["--layers", "none"], &["layers"]),
        (&["--layers", "99"], &["layers", "1 to 27 of deepseek-v2-lite"]),
        (&["--max-num-seqs", "0"], &["max_num_seqs"]),
        (&["--max-num-batched-tokens", "16"], &["max_num_batched_tokens", "16 tokens"]),
        (&["--report", "plots.png"], &["plots.png", ".html"]),
        (&["--kv-scale", "0.5"], &["kv_scale"]),
        (&["--kv-dtype", "fp8", "--kv-scale", "1e-40"], &["kv_scale", "1.1754944e-38"]),
        (&["--capture-sizes", "0"], &["0"]),
        (&["--device", "1"], &["no device 1"]),
        (&["--num-pages", "18446744073709551615"], &["num_pages"]),
        (&["--num-pages", "2147483647"], &["memory"]),
        (
            &["--max-num-seqs", "9223372036854775807", "--max-num-batched-tokens", "18446744073709551615"],
            &["max_num_seqs"],
        ),
    ] {
        run(&[&["replay", trace.path()], more].concat()).fails(words);
    }
    for (args, words) in [
        (&["gain", "--layers", "18446744073709551615"][..], &["layers", "4096"][..]),
        (&["gain", "--batch", "1", "--heads", "1", "--layers", "1", "--seq-len", "2147483647"], &["memory"]),
        (
            &["gain", "--batch", "65536", "--heads", "1", "--layers", "1", "--seq-len", "4194304"],
            &["seq_len", "page ids"],
        ),
        (&["bench", "--points", "B16777216 S16777216 H1"], &["points", "page ids"]),
        (&["bench", "--pool", "17592186044416"], &["pool"]),
        (&["soak", "--only", "0:18446744073709551615"], &["only"]),
    ] {
        run(args).fails(words);
    }
    for more in
        [&["--graph-mode", "fastest"][..], &["--split-policy", "fixed"], &["--acceptance", "2"], &["--nonsense"]]
    {
        let ran = run(&[&["replay", trace.path()], more].concat());
        assert_eq!(ran.status, Some(2), "{more:?}: {}", ran.err);
    }
}

#[test]
fn a_backend_that_is_not_there_is_an_error_and_auto_finds_another() {
    let trace = Scratch::holding(".csv", TRACE);
    for backend in ["cuda", "rocm"] {
        let ran = run(&[&["replay", trace.path(), "--backend", backend, "--max-steps", "1"], SMALL].concat());
        // Either the device is there and works, or the message says what is missing.
        if ran.status != Some(0) {
            ran.fails(&[backend]);
        }
    }
    run(&[&["replay", trace.path(), "--backend", "auto", "--verify", "1"], SMALL].concat()).shows(0, &["5 finished"]);
}

#[test]
fn resolve_explains_each_step() {
    run(&["resolve"]).shows(
        0,
        &["1. Builders", "UNIFORM_BATCH, set by latentwave", "-> FULL_AND_PIECEWISE", "FULL 4 (1 of padding)"],
    );
    let single = ["resolve", "--query-lens", "single-only", "--spec-tokens", "1"];
    run(&single).shows(0, &["FULL_AND_PIECEWISE becomes PIECEWISE", "need UNIFORM_BATCH"]);
    run(&["resolve", "--dcp", "2", "--spec-tokens", "1"]).shows(0, &["less than claimed", "-> PIECEWISE"]);
    run(&["resolve", "--other", "never"]).shows(0, &["NEVER, set by other"]);
    // The pair that vLLM PR 47144 is about cannot be made.
    let lie = ["resolve", "--query-lens", "single-only", "--claim", "uniform-batch"];
    run(&lie).fails(&["UNIFORM_BATCH", "SINGLE_ONLY", "UNIFORM_SINGLE_TOKEN_DECODE"]);
    run(&["resolve", "--graph-mode", "full", "--other", "never"]).fails(&["FULL", "other", "NEVER"]);
    let no_size = ["resolve", "--spec-tokens", "2", "--capture-sizes", "1,2"];
    run(&no_size).shows(0, &["no size holds a decode batch: none, of 1 to 16 sequences, has a full graph"]);
    for absurd in [
        ["--dcp", "0"],
        ["--spec-tokens", "1024"],
        ["--max-num-seqs", "0"],
        ["--max-num-batched-tokens", "99999999999"],
        ["--capture-sizes", "0"],
        ["--batch", "0"],
    ] {
        let ran = run(&[&["resolve"][..], &absurd].concat());
        assert!(ran.status == Some(2) && ran.err.contains("a whole number from"), "{absurd:?}: {}", ran.err);
    }
}

#[test]
fn info_shows_devices_and_presets() {
    run(&["info"]).shows(0, &["host 0: ", "cuda", "rocm", "deepseek-v3", "0.135234"]);
}

#[test]
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn kernels_are_shown_and_compiled_ahead_for_known_architectures_only() {
    run(&["info"]).shows(0, &["kernels\n", "disk cache: ", "run-time compiler: "]);
    run(&["precompile", "--arch", "vax"]).fails(&["`arch`", "`vax`", "architectures"]);
}

#[test]
fn bench_measures_and_checks() {
    let (json, plot) = (Scratch::new(".json"), Scratch::new(".svg"));
    let points = "B2 S40 H3 q1, var B3 ~50 H2 q2, skew B1 1x70 H2";
    let args = ["bench", "--points", points, "--model", "minicpm3", "--time", "0.02", "--pool", "1"];
    run(&[&args[..], &["--json", json.path(), "--plot", plot.path()]].concat())
        .shows(0, &["B2 S40 H3 q1", "var B3 ~50 H2 q2", "skew B1 1x70 H2 q1"]);
    assert!(plot.read().starts_with("<svg"));
    let value: Value = serde_json::from_str(&json.read()).unwrap();
    assert!(value["ceilings"]["read"].as_f64() > Some(0.0));
    for point in value["points"].as_array().unwrap() {
        assert!(point["us"].as_f64() > Some(0.0) && point["error"].as_f64() < Some(2e-2), "{point}");
        // Rounding to bf16 alone leaves some 1.6e-3 of the norm.
        let (norm, of_a_row) = (point["error_norm"].as_f64().unwrap(), point["error_norm_max"].as_f64().unwrap());
        assert!((1e-3..2.5e-3).contains(&norm) && (norm..4e-3).contains(&of_a_row), "{point}");
        assert!(point["checked_rows"].as_u64() > Some(1), "{point}");
    }
    run(&["bench", "--points", "B2"]).fails(&["points", "`B64 S4096 H16 q1`"]);
}

#[test]
fn options_that_would_change_nothing_are_refused() {
    for command in ["bench", "gain"] {
        for (option, value) in [("--tp", "2"), ("--kv-scale", "0.5")] {
            let ran = run(&[command, option, value]);
            assert!(ran.status == Some(2) && ran.err.contains(option), "{}", ran.err);
        }
        run(&[command, "--time", "-1"]).fails(&["`time`", "positive"]);
    }
}

#[test]
fn soak_checks_random_problems_and_repeats_one() {
    run(&["soak", "--small", "--seconds", "3", "--problems", "60"])
        .shows(0, &["of them graphs", "problems right in", "largest norm: bf16 "]);
    let one = ["soak", "--only", "3:7"];
    run(&one).shows(0, &["seed 3", "1 problem right in"]);
    run(&["soak", "--only", "3"]).shows(2, &[]);
    run(&["soak", "--seconds", "-1"]).fails(&["`seconds`", "positive"]);
    run(&["soak", "--problems", "0"]).fails(&["`problems`", "at least 1"]);
}

#[test]
fn soak_runs_problems_of_given_shapes() {
    let points = ["soak", "--problems", "2", "--points", "B2 S50 H3 q2, skew B1 1x4100 H2"];
    let shown = [
        "B2 S50 H3 q2: mla_decode_split_bf16_fp8_e4m3_512+64_",
        "skew B1 1x4100 H2 q1: mla_decode",
        "2 problems right",
    ];
    let shape = ["--kv-dtype", "fp8", "--page-size", "8", "--split-policy", "fixed:2", "--captured-for", "8192"];
    run(&[&points[..], &shape].concat()).shows(0, &shown);
    run(&["soak", "--ops", "--small", "--problems", "1"])
        .shows(0, &["written and gathered", "combined: right, norm 1."]);
    for (shape, fault) in [("B2", "a point is written"), ("", "none"), ("B9999 S9999 H1", "cached tokens")] {
        let ran = run(&["soak", "--points", shape]);
        assert!(ran.status == Some(1) && (ran.err.contains(fault) || ran.err.contains("are needed")), "{}", ran.err);
    }
    for unused in [&["--page-size", "8"][..], &["--portable"], &["--points", "B1 S9 H1", "--few"]] {
        assert_eq!(run(&[&["soak"], unused].concat()).status, Some(2), "{unused:?}");
    }
}

#[test]
fn help_documents_the_exit_status() {
    run(&["--help"]).shows(0, &["replay", "resolve", "info", "bench", "Exit status"]);
    run(&["replay", "--help"]).shows(0, &["--spec-tokens", "--verify", "Exit status", "130"]);
    for command in ["resolve", "info", "bench", "soak"] {
        run(&[command, "--help"]).shows(0, &["Options"]);
    }
}

#[test]
#[cfg(unix)]
fn ctrl_c_shows_what_was_measured() {
    let excerpt = excerpt();
    let mut child =
        program().arg("replay").arg(excerpt).args(SMALL).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    // The second line is printed when everything is reserved and captured.
    let mut head = String::new();
    out.read_line(&mut head).unwrap();
    out.read_line(&mut head).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{head}{rest}");
    assert!(rest.contains("left over") && rest.contains("served by"), "{rest}");
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_what_would_take_minutes() {
    for args in [
        &["bench", "--points", "B1 S64 H2, B1 S80 H2", "--pool", "1", "--time", "300"][..],
        &["gain", "--batch", "1", "--heads", "2", "--seq-len", "64", "--time", "300"],
        &["soak", "--seconds", "300"],
    ] {
        let mut child = program().args(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut String::new()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(500));
        let pressed = std::time::Instant::now();
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        out.read_to_string(&mut String::new()).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{args:?}");
        assert!(pressed.elapsed().as_secs() < 60, "{args:?} took {:?}", pressed.elapsed());
    }
}

#[test]
fn outputs_are_tried_before_anything_runs_and_no_input_is_written_over() {
    let trace = Scratch::holding(".csv", TRACE);
    let started = std::time::Instant::now();
    let ran = run(&["replay", trace.path(), "--json", "/nonexistent/x.json"]);
    assert_eq!(ran.status, Some(1), "{}", ran.err);
    assert!(ran.err.contains("/nonexistent/x.json") && ran.out.is_empty(), "{}\n{}", ran.err, ran.out);
    assert!(started.elapsed().as_secs() < 30);

    let ran = run(&["replay", trace.path(), "--json", trace.path()]);
    assert_eq!(ran.status, Some(1), "{}", ran.err);
    assert!(ran.err.contains("argument `json`"), "{}", ran.err);
    assert_eq!(trace.read(), TRACE, "the trace is as it was");

    let model = Scratch::holding(".json", "{}");
    for command in [&["replay", trace.path()][..], &["bench"], &["gain"]] {
        let ran = run(&[command, &["--model", model.path(), "--json", model.path()]].concat());
        assert!(ran.status == Some(1) && ran.err.contains("argument `json`"), "{command:?}: {}", ran.err);
        assert_eq!(model.read(), "{}", "the model is as it was");
    }

    let both = Scratch::new(".svg");
    let ran = run(&["replay", trace.path(), "--json", both.path(), "--report", both.path()]);
    assert_eq!(ran.status, Some(1), "{}", ran.err);
    let ran = run(&["bench", "--time", "1e300"]);
    assert_eq!(ran.status, Some(1), "{}", ran.err);
    assert!(ran.err.contains("argument `time`"), "{}", ran.err);
    assert_eq!(run(&["bench", "--points", ""]).status, Some(1));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_and_no_panic() {
    let full = || Stdio::from(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    let trace = Scratch::holding(".csv", TRACE);
    for command in [&["info"][..], &["resolve"], &[&["replay", trace.path()], SMALL].concat()] {
        let output = program().args(command).stdout(full()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("error: standard output: "), "{command:?}: {said}");
    }
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_ends_the_program_without_a_panic() {
    let mut child = program().arg("info").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    child.wait().unwrap();
    assert!(!err.contains("panicked"), "{err}");
}
