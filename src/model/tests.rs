use super::*;

const DEEPSEEK_V3: &str = r#"{
  "architectures": ["DeepseekV3ForCausalLM"],
  "model_type": "deepseek_v3",
  "hidden_size": 7168,
  "num_attention_heads": 128,
  "num_hidden_layers": 61,
  "q_lora_rank": 1536,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "rope_scaling": {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"
  }
}"#;

fn parse_error(text: &str) -> (String, String) {
    match ModelConfig::from_json(text, "config.json") {
        Err(Error::Parse { what, place, problem }) => {
            assert_eq!(what, "config.json");
            (place, problem)
        }
        other => panic!("a parse error was expected, got {other:?}"),
    }
}

/// `DEEPSEEK_V3` with one key set to another value, or taken away.
fn with(key: &str, value: Option<Value>) -> String {
    let mut root: Value = serde_json::from_str(DEEPSEEK_V3).unwrap();
    match value {
        Some(value) => root[key] = value,
        None => drop(root.as_object_mut().unwrap().remove(key)),
    }
    root.to_string()
}

#[test]
fn yarn_scale_of_deepseek_v3_by_hand() {
    // ln 40 = 3.688879; 0.1 * 1 * ln 40 + 1 = 1.3688879; squared 1.8738542; / sqrt(192) = / 13.8564065 = 0.1352338.
    let model = ModelConfig::preset("deepseek-v3").unwrap();
    assert!((model.softmax_scale() - 0.135_233_8).abs() < 1e-7, "{}", model.softmax_scale());
    assert_eq!(model.mla(8, 64).unwrap().sm_scale, model.softmax_scale() as f32);
}

#[test]
fn scales_without_yarn_by_hand() {
    // 192 + 64 = 256, 64 + 32 = 96.
    assert_eq!(ModelConfig::preset("glm-5").unwrap().softmax_scale(), 1.0 / 16.0);
    assert!((ModelConfig::preset("minicpm3").unwrap().softmax_scale() - 0.102_062_07).abs() < 1e-8);
    // YaRN up to factor 1 stretches nothing, and a zero mscale_all_dim sharpens nothing.
    assert_eq!(YarnScale { factor: 1.0, mscale_all_dim: 1.0 }.multiplier(), 1.0);
    assert_eq!(YarnScale { factor: 40.0, mscale_all_dim: 0.0 }.multiplier(), 1.0);
}

#[test]
fn presets_are_whole() {
    for name in ModelConfig::presets() {
        let model = ModelConfig::preset(name).unwrap();
        let mla = model.mla(1, 64).unwrap();
        assert_eq!(mla.num_heads, model.num_heads, "{name}");
        assert!([576, 320, 288].contains(&mla.head_dim()), "{name}: {}", mla.head_dim());
        assert!(model.num_layers >= 27, "{name}");
    }
    assert_eq!(ModelConfig::preset("DeepSeek-V3").unwrap().name, "deepseek-v3");
    let message = ModelConfig::preset("gpt-2").unwrap_err().to_string();
    assert!(message.contains("`gpt-2`") && message.contains("kimi-k2"), "{message}");
}

#[test]
fn a_file_equals_its_preset() {
    let read = ModelConfig::from_json(DEEPSEEK_V3, "deepseek-v3").unwrap();
    assert_eq!(read, ModelConfig::preset("deepseek-v3").unwrap());
}

#[test]
fn nested_text_config_and_rope_parameters() {
    let text = r#"{ "model_type": "mistral3", "vision_config": {"num_attention_heads": 7}, "text_config": {
        "model_type": "mistral4", "num_attention_heads": 32, "num_hidden_layers": 36, "q_lora_rank": 1024,
        "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "mscale_all_dim": 1.0} } }"#;
    assert_eq!(
        ModelConfig::from_json(text, "mistral-small-4").unwrap(),
        ModelConfig::preset("mistral-small-4").unwrap()
    );
}

#[test]
fn families_with_their_own_keys() {
    let longcat = r#"{ "model_type": "longcat_flash", "num_attention_heads": 64, "num_layers": 28, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128 }"#;
    assert_eq!(
        ModelConfig::from_json(longcat, "longcat-flash").unwrap(),
        ModelConfig::preset("longcat-flash").unwrap()
    );
    let minicpm = r#"{ "model_type": "minicpm3", "hidden_size": 2560, "num_attention_heads": 40, "num_hidden_layers": 62,
        "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]} }"#;
    assert_eq!(ModelConfig::from_json(minicpm, "minicpm3").unwrap(), ModelConfig::preset("minicpm3").unwrap());
}

#[test]
fn optional_keys() {
    assert_eq!(ModelConfig::from_json(&with("q_lora_rank", Some(Value::Null)), "c").unwrap().q_lora_rank, None);
    assert_eq!(ModelConfig::from_json(&with("q_lora_rank", None), "c").unwrap().q_lora_rank, None);
    assert_eq!(ModelConfig::from_json(&with("rope_scaling", None), "c").unwrap().yarn, None);
    // A stretch that does not touch the softmax, and a kind that never does.
    for rope in [serde_json::json!({"type": "yarn", "factor": 4}), serde_json::json!({"type": "linear", "factor": 4})] {
        assert_eq!(ModelConfig::from_json(&with("rope_scaling", Some(rope)), "c").unwrap().yarn, None);
    }
    assert_eq!(ModelConfig::from_json(&with("qk_rope_head_dim", Some(0.into())), "c").unwrap().qk_rope_head_dim, 0);
}

#[test]
fn every_truncation_is_an_error() {
    for end in 0..DEEPSEEK_V3.len() {
        let (place, problem) = parse_error(&DEEPSEEK_V3[..end]);
        assert!(place.starts_with("line "), "{place}");
        assert!(!problem.is_empty());
    }
}

#[test]
fn errors_name_the_key() {
    for key in [
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_hidden_layers",
    ] {
        let (place, problem) = parse_error(&with(key, None));
        assert_eq!((place, &problem[..7]), (format!("key `{key}`"), "missing"));
        for bad in
            [serde_json::json!(-1), serde_json::json!(1.5), serde_json::json!("512"), serde_json::json!(1_u64 << 40)]
        {
            let (place, problem) = parse_error(&with(key, Some(bad)));
            assert_eq!(place, format!("key `{key}`"));
            assert!(problem.contains("whole number"), "{problem}");
        }
    }
    assert!(parse_error(&with("num_attention_heads", Some(0.into()))).1.starts_with("0: a whole number from 1"));
    let rope = |rope: Value| parse_error(&with("rope_scaling", Some(rope)));
    assert_eq!(rope(serde_json::json!([40])).0, "key `rope_scaling`");
    assert_eq!(rope(serde_json::json!({"type": "yarn", "mscale_all_dim": 1.0})).0, "key `rope_scaling.factor`");
    assert_eq!(
        rope(serde_json::json!({"type": "yarn", "factor": "40", "mscale_all_dim": 1})).0,
        "key `rope_scaling.factor`"
    );
    assert_eq!(parse_error(r#"{"text_config": {"num_attention_heads": 4}}"#).0, "key `text_config.kv_lora_rank`");
    assert_eq!(parse_error(r#"{"text_config": 3}"#).0, "key `text_config`");
    assert!(parse_error("[]").1.contains("object"));
    assert!(parse_error("{ nonsense }").0.starts_with("line 1"));
}

#[test]
fn heads_must_divide() {
    let model = ModelConfig::preset("glm-4.7-flash").unwrap();
    assert_eq!(model.mla(4, 64).unwrap().num_heads, 5);
    for tensor_parallel in [0, 3, 8, 40] {
        let message = model.mla(tensor_parallel, 64).unwrap_err().to_string();
        assert!(message.contains("tensor_parallel") && message.contains("[1, 2, 4, 5, 10, 20]"), "{message}");
    }
    assert!(matches!(model.mla(1, 0), Err(Error::Argument { arg: "page_size", .. })));
}
