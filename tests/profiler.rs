//! Ranges in a profiler: an NVTX tool and a rocTX library, both made here by the C compiler, see them nested; without any nothing
//! happens.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

use latentwave::session::{DecodeSession, SessionConfig, StepBatch};
use latentwave::testing::not_run;
use latentwave::{DType, Host, KvCache, MlaConfig, Tensor};

/// A tool as NVTX's header describes it: asked for functions, it puts its own into the table of module 1.
const NVTX_TOOL: &str = r#"
#include <stdint.h>
#include <stdio.h>
typedef void (*function)(void);
typedef struct { size_t size; int (*table)(int, function ***, unsigned *); } callbacks;
typedef struct { size_t size; uint32_t version, reserved; void (*set)(uint32_t); } version;
static int push(const char *name) { fprintf(stderr, "nvtx push %s\n", name); return 0; }
static int pop(void) { fprintf(stderr, "nvtx pop\n"); return 0; }
int InitializeInjectionNvtx2(const void *(*get)(uint32_t)) {
  const callbacks *c = get(1);
  const version *v = get(3);
  function **table;
  unsigned size;
  if (!c || c->size < sizeof *c || !v || v->version < 2 || get(7)) return 0;
  for (int module = 1; module <= 6; module++) if (!c->table(module, &table, &size) || !table) return 0;
  if (c->table(0, &table, &size) || c->table(7, &table, &size)) return 0;
  if (!c->table(1, &table, &size) || size < 16) return 0;
  *table[9] = (function)push;
  *table[11] = (function)pop;
  v->set(3);
  return 1;
}
"#;

const ROCTX: &str = r#"
#include <stdio.h>
int roctxRangePushA(const char *name) { fprintf(stderr, "roctx push %s\n", name); return 0; }
int roctxRangePop(void) { fprintf(stderr, "roctx pop\n"); return 0; }
"#;

/// A session's life; run in a process of its own, whose environment names the libraries.
#[test]
#[ignore = "run by the tests below"]
fn child() {
    let dev = Host::with_threads(1);
    let mla = MlaConfig::deepseek(1, 16);
    let config = SessionConfig { capture_sizes: Some(vec![1]), ..SessionConfig::new(mla, 1, 16, 1) };
    let mut session = DecodeSession::new(&dev, config).expect("a session");
    let cache = KvCache::zeros(&dev, 1, &mla, DType::BF16).expect("a cache");
    let q = Tensor::zeros(&dev, [1, 1, 576], DType::BF16).expect("queries");
    let mut out = Tensor::zeros(&dev, [1, 1, 512], DType::BF16).expect("outputs");
    session.capture(|step| step.decode(&q, &cache, &mut out, None)).expect("a capture").all().expect("all sizes");
    let batch = StepBatch::decode(1, &[3], &[[0]]);
    session.step(&batch, |step| step.decode(&q, &cache, &mut out, None)).expect("a step");
}

fn run_child(variables: &[(&str, &Path)]) -> String {
    let mut child = Command::new(std::env::current_exe().expect("this test"));
    child.args(["--ignored", "--exact", "child", "--nocapture"]).env_remove("NVTX_INJECTION64_PATH");
    let output = child.envs(variables.iter().copied()).output().expect("the child runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

/// Compiles a library into a folder of its own, or says why not.
fn library(name: &str, text: &str) -> Option<PathBuf> {
    let dir = std::env::temp_dir().join(format!("latentwave-profiler-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("the temporary directory");
    std::fs::write(dir.join("tool.c"), text).expect("the temporary directory");
    let path = dir.join(name);
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&path).arg(dir.join("tool.c")).output();
    match compiled {
        Ok(output) if output.status.success() => Some(path),
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            not_run("profiler", "cc", &error);
            None
        }
    }
}

/// Ranges are well nested, and a step holds dispatch and replay.
fn check(said: &str, profiler: &str) {
    let mut open = Vec::new();
    let mut seen = Vec::new();
    for line in said.lines().filter_map(|line| line.strip_prefix(profiler)) {
        match line.trim().strip_prefix("push latentwave: ") {
            Some(name) => {
                seen.push(format!("{} > {name}", open.last().copied().unwrap_or("-")));
                open.push(name);
            }
            None => assert!(line.trim() == "pop" && open.pop().is_some(), "{said}"),
        }
    }
    assert!(open.is_empty(), "{open:?} never ended: {said}");
    for range in ["- > session", "session > plan", "- > capture", "- > step", "step > dispatch", "step > replay"] {
        assert!(seen.iter().any(|seen| seen == range), "no `{range}` in {seen:?}");
    }
}

#[test]
fn a_tool_that_nvtx_injects_sees_the_ranges() {
    let Some(tool) = library("tool.so", NVTX_TOOL) else { return };
    check(&run_child(&[("NVTX_INJECTION64_PATH", &tool)]), "nvtx");
    std::fs::remove_dir_all(tool.parent().expect("its folder")).expect("it was made here");
}

#[test]
fn roctx_sees_the_ranges() {
    let Some(tool) = library("libroctx64.so", ROCTX) else { return };
    let folder = tool.parent().expect("its folder");
    check(&run_child(&[("LD_LIBRARY_PATH", folder)]), "roctx");
    std::fs::remove_dir_all(folder).expect("it was made here");
}

#[test]
fn without_a_profiler_there_are_no_ranges_and_no_errors() {
    let said = run_child(&[("NVTX_INJECTION64_PATH", Path::new("/no/such/tool.so"))]);
    assert!(!said.contains("push"), "{said}");
}
