//! Hugging Face `config.json` files: what is read makes a layer that validates, or is refused.
#![no_main]

use latentwave::ModelConfig;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let Ok(model) = ModelConfig::from_json(text, "config.json") else { return };
    assert!(model.num_heads > 0 && model.kv_lora_rank > 0 && model.num_layers > 0);
    for tensor_parallel in [0, 1, 8, model.num_heads] {
        if let Ok(mla) = model.mla(tensor_parallel, 64) {
            assert_eq!(mla.num_heads * tensor_parallel, model.num_heads);
            assert!(mla.validate().is_ok() && mla.sm_scale.is_finite() && mla.sm_scale > 0.0);
        }
    }
});
