import { render } from "preact";
import { useEffect } from "preact/hooks";
import { loadModels } from "./api";
import { LivePanel } from "./live/live";
import { route, Shell } from "./shell";
import "./style.css";

function View() {
  if (route.value.startsWith("/live")) return <LivePanel />;
  return <section class="panel">…</section>;
}

function Page() {
  useEffect(() => void loadModels(), []);
  return (
    <Shell>
      <View />
    </Shell>
  );
}

const place = document.getElementById("page");
if (place) render(<Page />, place);
